"""`echo` with the prompt's log-probabilities, which evaluation tools ask for, against transformers' log-softmax."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import cache

import openai
import pytest
import torch
from asking import until_free
from meshes import Mesh
from openai.types import Completion, CompletionChoice
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

CHUNK_TOKENS = 64  # of the shared mesh
TEXT = "What is the capital of France? 日本 🎉 " * 8
NEW_TOKENS = 6
TOP = 3


@cache
def reference(folder: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@cache
def tokenizer(folder: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


def log_softmax(folder: str, token_ids: Sequence[int]) -> torch.Tensor:
    """Row p: the log-probabilities of what follows the tokens up to p."""
    with torch.inference_mode():
        return torch.log_softmax(reference(folder)(torch.tensor([list(token_ids)])).logits[0].double(), dim=-1)


@pytest.fixture(params=["disaggregated", "aggregated"])
def either_mesh(request: pytest.FixtureRequest) -> Mesh:
    found: Mesh = request.getfixturevalue("mesh" if request.param == "disaggregated" else "aggregated_mesh")
    return found


@pytest.fixture
async def client(either_mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{either_mesh.http}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


async def ask(client: openai.AsyncOpenAI, prompt: str | list[int], **options: object) -> Completion:
    asked: dict[str, object] = {"model": "tiny-llama", "prompt": prompt, "temperature": 0, "echo": True} | options
    answer: Completion = await client.completions.create(**asked, extra_body={"ignore_eos": True})
    return answer


def check(choice: CompletionChoice, rows: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Each token's row is that of what came before it; nothing comes before the first."""
    found = choice.logprobs
    assert found is not None
    assert len(found.tokens) == len(found.text_offset) == len(token_ids)
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    expected = [float(row[token]) for row, token in zip(rows, token_ids[1:], strict=False)]
    assert found.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    for row, top, token in zip(rows, found.top_logprobs[1:], token_ids[1:], strict=False):
        best = sorted({int(i) for i in row.topk(TOP).indices} | {token}, key=lambda i: -float(row[i]))
        assert sorted(top.values(), reverse=True) == pytest.approx([float(row[i]) for i in best], abs=1e-4)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_prefill_computes_the_prompts_logprobs_and_the_gateway_merges_them(
    either_mesh: Mesh, client: openai.AsyncOpenAI, as_ids: bool
) -> None:
    """F5. The prompt is computed in several chunks; its tokens stand before those of the answer without an echo."""
    folder = either_mesh.model
    ids = tokenizer(folder)(TEXT)["input_ids"]
    assert len(ids) > 2 * CHUNK_TOKENS
    prompt = ids if as_ids else TEXT
    options = {"max_tokens": NEW_TOKENS, "logprobs": TOP}
    (whole,) = (await ask(client, prompt, **options)).choices
    plain = (await ask(client, prompt, **options, echo=False)).choices[0]
    assert whole.text == TEXT + plain.text
    assert whole.logprobs is not None and plain.logprobs is not None
    answer = (
        reference(folder)
        .generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[0]
        .tolist()
    )
    check(whole, log_softmax(folder, answer), answer)
    begin = len(ids)
    assert whole.logprobs.tokens[begin:] == plain.logprobs.tokens
    assert whole.logprobs.token_logprobs[begin:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    assert whole.logprobs.text_offset[begin:] == [len(TEXT) + offset for offset in plain.logprobs.text_offset]
    await until_free(either_mesh)


@pytest.mark.parametrize("new_tokens", [0, NEW_TOKENS])
async def test_a_streamed_echo_is_the_unstreamed_one(
    either_mesh: Mesh, client: openai.AsyncOpenAI, new_tokens: int
) -> None:
    """F5."""
    options = {"max_tokens": new_tokens, "logprobs": TOP}
    (whole,) = (await ask(client, TEXT, **options)).choices
    chunks = [choice async for c in await ask(client, TEXT, **options, stream=True) for choice in c.choices]
    assert ("".join(choice.text for choice in chunks), chunks[-1].finish_reason) == (whole.text, "length")
    parts = [choice.logprobs for choice in chunks if choice.logprobs is not None]
    expected = whole.logprobs
    assert expected is not None
    assert [token for part in parts for token in part.tokens] == expected.tokens
    assert [offset for part in parts for offset in part.text_offset] == expected.text_offset
    first, *others = [value for part in parts for value in part.token_logprobs]
    assert (first, others) == (None, pytest.approx(expected.token_logprobs[1:], abs=1e-4))
    first, *others = [top for part in parts for top in part.top_logprobs]
    assert first is None and [top.keys() for top in others] == [top.keys() for top in expected.top_logprobs[1:]]
    await until_free(either_mesh)


@pytest.mark.parametrize("tokens", [1, 2, CHUNK_TOKENS, CHUNK_TOKENS + 1])
async def test_a_prompt_is_scored_without_an_answer(either_mesh: Mesh, client: openai.AsyncOpenAI, tokens: int) -> None:
    """F5 as evaluation tools ask: no new tokens at all."""
    folder = either_mesh.model
    ids = tokenizer(folder)(TEXT)["input_ids"][:tokens]
    scored = await ask(client, ids, max_tokens=0, logprobs=TOP)
    check(scored.choices[0], log_softmax(folder, ids)[:-1], ids)
    assert (scored.choices[0].text, scored.choices[0].finish_reason) == (tokenizer(folder).decode(ids), "length")
    assert scored.usage is not None
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (tokens, 0)
    await until_free(either_mesh)
