"""The official OpenAI client against a whole mesh: what is streamed is what is answered (cases G6, G7, G11).

The model is random, so its tokens are pieces of bytes in no order: a hard case for characters of several tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from asking import until_free
from meshes import Mesh

MODEL = "tiny-llama"
PROMPTS = [[5 + i, 40, 41, 42 + i] for i in range(6)]


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.http}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


async def streamed(client: openai.AsyncOpenAI, prompt: list[int], **options: object) -> tuple[str, str | None]:
    stream = await client.completions.create(
        model=MODEL, prompt=prompt, stream=True, temperature=0, extra_body={"ignore_eos": True}, **options
    )
    text, finish = "", None
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            finish = choice.finish_reason or finish
    return text, finish


async def unstreamed(client: openai.AsyncOpenAI, prompt: list[int], **options: object) -> tuple[str, str | None]:
    reply = await client.completions.create(
        model=MODEL, prompt=prompt, temperature=0, extra_body={"ignore_eos": True}, **options
    )
    return reply.choices[0].text, reply.choices[0].finish_reason


async def test_the_joined_stream_is_the_unstreamed_text(client: openai.AsyncOpenAI) -> None:
    """G7."""
    for prompt in PROMPTS:
        joined, whole = await streamed(client, prompt, max_tokens=60), await unstreamed(client, prompt, max_tokens=60)
        assert joined == whole
        assert len(whole[0]) > 10
        assert whole[1] == "length"


async def test_a_stop_string_over_several_tokens_ends_the_answer_before_it(client: openai.AsyncOpenAI) -> None:
    """G6: three characters out of the middle of the undisturbed text; the earliest place where they stand counts."""
    for prompt in PROMPTS:
        text, _ = await unstreamed(client, prompt, max_tokens=60)
        stop = text[len(text) // 2 :][:3]
        expected = (text[: text.index(stop)], "stop")
        assert await streamed(client, prompt, max_tokens=60, stop=[stop, "never said"]) == expected
        assert await unstreamed(client, prompt, max_tokens=60, stop=stop) == expected


async def test_usage_is_the_last_chunk_when_asked_for_and_agrees_with_the_answer(client: openai.AsyncOpenAI) -> None:
    """G11."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"model": MODEL, "messages": messages, "max_tokens": 7, "temperature": 0}
    extra = {"extra_body": {"ignore_eos": True}}
    await client.chat.completions.create(**options, **extra)  # type: ignore[call-overload]
    # From here on the prompt is cached, and usage says so.
    whole = await client.chat.completions.create(**options, **extra)  # type: ignore[call-overload]
    stream = await client.chat.completions.create(  # type: ignore[call-overload]
        **options, **extra, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 7


async def test_errors_are_what_the_client_expects(client: openai.AsyncOpenAI, mesh: Mesh) -> None:
    """G1, G8, G9 as an SDK sees them."""
    with pytest.raises(openai.BadRequestError, match="2048"):
        await client.completions.create(model=MODEL, prompt=[5], max_tokens=4000, stream=True)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt="x", n=17)
    assert refused.value.param == "n"
    for prompt in ("", [], [""]):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=MODEL, prompt=prompt)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="gpt-9", prompt="x")
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{mesh.http}/health")).status_code == 200
    await until_free(mesh)
