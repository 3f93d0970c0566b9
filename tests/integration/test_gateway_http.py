"""The HTTP door through its real port: raw with httpx, and with the official openai client. Cases G1, G4, G8 to G11."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import grpc
import httpx
import openai
import pytest
from diptych.v1 import decode_pb2, worker_pb2
from gateway_peers import (
    END,
    LENGTH,
    STOP,
    Scene,
    decoding,
    endless_decode,
    endless_prefill,
    failing_decode,
    ids,
    prefilling,
    scene,
    tokens,
)
from openai.types import CompletionChoice

HELLO = ids("Hello")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def world() -> AsyncIterator[Scene]:
    async with scene() as built:
        built.scheduler.pairs = [(None, built.decode)]
        yield built


@pytest.fixture
async def http(world: Scene) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=world.http, timeout=20) as client:
        yield client


@pytest.fixture
async def client(world: Scene) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{world.http}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


async def over(queue: asyncio.Queue[str]) -> str:
    return await asyncio.wait_for(queue.get(), 5)


def events(body: str) -> list[str]:
    assert body.endswith("\n\n")
    lines = body.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def test_the_openai_client_reads_a_chat(world: Scene, client: openai.AsyncOpenAI) -> None:
    world.decode.decodes = [decoding(tokens(0, [*HELLO, END], STOP))]
    answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], seed=-1)
    assert answer.choices[0].message.content == "Hello" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop" and answer.id == "chatcmpl-request1"
    assert answer._request_id == "request1"
    assert answer.usage is not None and answer.usage.prompt_tokens == len("<user>hi<a>")
    assert answer.usage.completion_tokens == 6 and answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 2
    sent = world.decode.decode_requests[0].sequence
    assert list(sent.token_ids) == ids("<user>hi<a>") and sent.max_new_tokens == 64 - len("<user>hi<a>")
    assert sent.sampling.temperature == 1.0 and sent.sampling.seed == 2**64 - 1


async def test_the_openai_client_streams_a_chat_with_usage(world: Scene, client: openai.AsyncOpenAI) -> None:
    world.decode.decodes = [decoding(*(tokens(i, [t]) for i, t in enumerate(HELLO)), tokens(5, [], LENGTH))]
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "Hello"
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    assert not any(part.choices[0].finish_reason for part in parts[:-1])
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 5
    assert all(part.usage is None for part in parts)


async def test_a_stream_ends_with_the_end_mark_and_usage_only_when_asked(world: Scene, http: httpx.AsyncClient) -> None:
    world.decode.decodes = [decoding(tokens(0, HELLO, LENGTH)) for _ in range(2)]
    plain = await http.post(TEXT_PATH, json=TEXT | {"stream": True})
    assert plain.headers["content-type"].startswith("text/event-stream")
    assert plain.headers["x-request-id"] == "request1"
    *chunks, mark = events(plain.text)
    assert mark == "[DONE]" and all(json.loads(chunk)["choices"] for chunk in chunks)
    assert not any("usage" in json.loads(chunk) for chunk in chunks)
    asked = await http.post(TEXT_PATH, json=TEXT | {"stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, mark = events(asked.text)
    assert mark == "[DONE]" and json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["completion_tokens"] == 5
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == "Hello"


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [("hi", ids("hi")), (["hi"], ids("hi")), ([5, 6], [5, 6]), ([[5, 6]], [5, 6])],
    ids=["text", "one text", "ids", "one list of ids"],
)
async def test_prompts_are_text_or_token_ids(
    world: Scene, client: openai.AsyncOpenAI, prompt: list[int], sent: list[int]
) -> None:
    world.decode.decodes = [decoding(tokens(0, HELLO, LENGTH))]
    answer = await client.completions.create(model="tiny", prompt=prompt, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == "Hello" and answer.choices[0].finish_reason == "length"
    sequence = world.decode.decode_requests[0].sequence
    assert list(sequence.token_ids) == sent and sequence.max_new_tokens == 16 and not sequence.stop_token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_characters_of_several_tokens_arrive_whole(
    world: Scene, client: openai.AsyncOpenAI, stream: bool
) -> None:
    text = "日本語 🎉"
    word = ids(text)
    world.decode.decodes = [decoding(*(tokens(i, [t]) for i, t in enumerate(word)), tokens(len(word), [], LENGTH))]
    if stream:
        chunks = [c async for c in await client.completions.create(model="tiny", prompt="hi", stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
        assert not any("�" in chunk.choices[0].text for chunk in chunks)
    else:
        assert (await client.completions.create(model="tiny", prompt="hi")).choices[0].text == text


BAD = [
    (CHAT_PATH, {"temperature": "hot"}, "temperature"),
    (CHAT_PATH, {"temperature": -0.1}, "temperature"),
    (CHAT_PATH, {"top_p": 0}, "top_p"),
    (CHAT_PATH, {"top_p": 2}, "top_p"),
    (CHAT_PATH, {"max_tokens": -1}, "max_tokens"),
    (CHAT_PATH, {"max_tokens": 60}, "max_tokens"),
    (CHAT_PATH, {"max_tokens": 1.5}, "max_tokens"),
    (CHAT_PATH, {"n": 0}, "n"),
    (CHAT_PATH, {"n": 17}, "n"),
    (TEXT_PATH, {"n": -1}, "n"),
    (CHAT_PATH, {"logprobs": 2}, "logprobs"),
    (CHAT_PATH, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT_PATH, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (TEXT_PATH, {"logprobs": 21}, "logprobs"),
    (TEXT_PATH, {"logprobs": True}, "logprobs"),
    (CHAT_PATH, {"prompt_logprobs": 1}, "prompt_logprobs"),
    (CHAT_PATH, {"logit_bias": {"99999": 1}}, "logit_bias"),
    (CHAT_PATH, {"tools": [{"type": "function"}]}, "tools"),
    (CHAT_PATH, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT_PATH, {"logit_bias": {"1": 101}}, "logit_bias"),
    (CHAT_PATH, {"logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT_PATH, {"presence_penalty": 2.5}, "presence_penalty"),
    (CHAT_PATH, {"frequency_penalty": -2.5}, "frequency_penalty"),
    (CHAT_PATH, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT_PATH, {"no_such_field": 1}, "no_such_field"),
    (CHAT_PATH, {"messages": []}, "messages"),
    (CHAT_PATH, {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    (CHAT_PATH, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT_PATH, {"messages": [{"role": "user", "content": "hi", "extra": 1}]}, "messages[0].extra"),
    (CHAT_PATH, {"stop": [""]}, "stop"),
    (CHAT_PATH, {"stop": ["a"] * 17}, "stop"),
    (CHAT_PATH, {"stop": 3}, "stop"),
    (CHAT_PATH, {"seed": 2**64}, "seed"),
    (TEXT_PATH, {"prompt": ""}, "prompt"),
    (TEXT_PATH, {"prompt": [""]}, "prompt"),
    (TEXT_PATH, {"prompt": []}, "prompt"),
    (TEXT_PATH, {"prompt": ["a", "b"]}, "prompt"),
    (TEXT_PATH, {"prompt": [1, "a"]}, "prompt"),
    (TEXT_PATH, {"prompt": [99999]}, "prompt"),
    (TEXT_PATH, {"prompt": [-1]}, "prompt"),
    (TEXT_PATH, {"prompt": "x" * 64}, "prompt"),
    (TEXT_PATH, {"echo": "yes"}, "echo"),
    (CHAT_PATH, {"echo": True}, "echo"),
    (TEXT_PATH, {"max_tokens": 0}, "max_tokens"),
    (TEXT_PATH, {"max_tokens": -1, "echo": True}, "max_tokens"),
    (TEXT_PATH, {"best_of": 2}, "best_of"),
    (TEXT_PATH, {"suffix": "x"}, "suffix"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_bad_or_not_supported_is_a_400_naming_the_field(
    world: Scene, http: httpx.AsyncClient, stream: bool
) -> None:
    for path, change, field in BAD:
        body = (CHAT if path == CHAT_PATH else TEXT) | {"stream": stream} | change
        answer = await http.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400, (change, error)
        assert error["param"] == field and field in error["message"] and "\n" not in error["message"]
        assert error["type"] == "invalid_request_error" and answer.headers["x-request-id"]
    assert not world.scheduler.placed


async def test_a_body_that_cannot_be_read_is_a_400(http: httpx.AsyncClient) -> None:
    for raw, said in (
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"model":"tiny","prompt":"hi","temperature":NaN}', "temperature"),
        (b'{"model":"tiny","prompt":"\\ud800"}', ""),
        (b'{"model":"tiny"}', "prompt"),
        (b'{"prompt":"hi"}', "model"),
    ):
        answer = await http.post(TEXT_PATH, content=raw)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"], raw


async def test_the_limits_are_in_the_message_before_any_stream_byte(http: httpx.AsyncClient) -> None:
    answer = await http.post(TEXT_PATH, json=TEXT | {"max_tokens": 63, "stream": True})
    assert answer.status_code == 400
    assert "prompt (2 tokens) + max_tokens (63) = 65 is over the context of 64" in answer.json()["error"]["message"]


async def test_an_unknown_model_and_an_unknown_path_are_404(http: httpx.AsyncClient) -> None:
    answer = await http.post(CHAT_PATH, json=CHAT | {"model": "gpt-x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found" and answer.json()["error"]["param"] == "model"
    missing = await http.get("/v2/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["message"] and missing.headers["x-request-id"]
    assert (await http.get(CHAT_PATH)).status_code == 405


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
        (grpc.StatusCode.INTERNAL, 500),
    ],
)
async def test_a_failure_before_the_answer_has_its_own_status(
    world: Scene, http: httpx.AsyncClient, code: grpc.StatusCode, status: int, stream: bool
) -> None:
    world.scheduler.failures = [(code, "scripted", (("retry-after-ms", "2500"),))] * 3
    answer = await http.post(CHAT_PATH, json=CHAT | {"stream": stream})
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert answer.headers.get("retry-after") == ("3" if status == 429 else None)


def logged(offset: int, token_ids: list[int], reason: int = 0) -> decode_pb2.DecodeResponse:
    """Tokens with log-probabilities: each token's is minus its id, an x is the one alternative."""
    message = tokens(offset, token_ids, reason)
    for token_id in token_ids:
        message.logprobs.add(logprob=-token_id, top_token_ids=ids("x"), top_logprobs=[-0.5])
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chats_logprobs_are_those_of_the_tokens_of_its_text(
    world: Scene, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """The stop string's tokens and the end token belong to no text; a character may be of several tokens."""
    for text, stop in (("Aé日", None), ("A日<stop>", "<stop>")):
        word = ids(text)
        cut = ids(text.removesuffix(stop or ""))
        world.decode.decodes = [decoding(*(logged(i, [t]) for i, t in enumerate(word)), logged(len(word), [END], STOP))]
        entries = []
        asked = {"model": "tiny", "messages": CHAT["messages"], "logprobs": True, "top_logprobs": 1, "stop": stop}
        if stream:
            async for chunk in await client.chat.completions.create(stream=True, **asked):
                logprobs = chunk.choices[0].logprobs
                entries += logprobs.content if logprobs else []
        else:
            answer = await client.chat.completions.create(**asked)
            assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.refusal is None
            entries = answer.choices[0].logprobs.content
        assert [entry.logprob for entry in entries] == [-token for token in cut]
        assert bytes(byte for entry in entries for byte in entry.bytes).decode() == text.removesuffix(stop or "")
        assert entries[0].token == "A" and entries[-1].token.startswith("bytes:\\x")
        assert [(top.token, top.logprob, top.bytes) for top in entries[0].top_logprobs] == [("x", -0.5, [120])]
        sent = world.decode.decode_requests[-1].sequence.sampling
        assert sent.logprobs == 1 and not sent.HasField("prompt_logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completions_logprobs_are_four_lists_of_the_same_length(
    world: Scene, client: openai.AsyncOpenAI, stream: bool
) -> None:
    word = ids("Aé!")
    world.decode.decodes = [decoding(*(logged(i, [t]) for i, t in enumerate(word)), tokens(len(word), [], LENGTH))]
    if stream:
        chunks = [c async for c in await client.completions.create(model="tiny", prompt="hi", logprobs=1, stream=True)]
        found = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs is not None]
    else:
        answer = await client.completions.create(model="tiny", prompt="hi", logprobs=1)
        assert answer.choices[0].logprobs is not None
        found = [answer.choices[0].logprobs]
    assert [token for part in found for token in part.tokens] == ["A", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert [value for part in found for value in part.token_logprobs] == [-token for token in word]
    assert [offset for part in found for offset in part.text_offset] == [0, 1, 1, 2]
    assert next(top for part in found for top in part.top_logprobs) == {"A": -word[0], "x": -0.5}


def foretold(message: decode_pb2.DecodeResponse, prompt: str) -> decode_pb2.DecodeResponse:
    """With the log-probabilities of the prompt's tokens, as `logged` has them."""
    for token_id in ids(prompt)[1:]:
        message.begin.prompt_logprobs.add(logprob=-token_id, top_token_ids=ids("x"), top_logprobs=[-0.5])
    return message


async def choices(client: openai.AsyncOpenAI, *, stream: bool, **asked: object) -> list[CompletionChoice]:
    """All choices of the answer, in order: one, or those of a stream's chunks."""
    if not stream:
        return (await client.completions.create(model="tiny", **asked)).choices
    chunks = await client.completions.create(model="tiny", stream=True, **asked)
    return [choice async for chunk in chunks for choice in chunk.choices]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_begins_with_the_prompt_and_the_answer_follows(
    world: Scene, client: openai.AsyncOpenAI, stream: bool
) -> None:
    for prompt in ("hé", ids("hé")):
        world.decode.decodes = [decoding(tokens(0, HELLO[:1]), tokens(1, HELLO[1:], LENGTH))]
        found = await choices(client, stream=stream, prompt=prompt, echo=True, max_tokens=5)
        assert "".join(choice.text for choice in found) == "héHello"
        assert all(choice.logprobs is None for choice in found)
        assert found[-1].finish_reason == "length"
        assert not world.decode.decode_requests[-1].sequence.sampling.HasField("prompt_logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echos_logprobs_begin_with_the_prompts_whose_first_is_null(
    world: Scene, client: openai.AsyncOpenAI, stream: bool
) -> None:
    both = ids("héA!")
    first = foretold(logged(0, both[3:4]), "hé")
    world.decode.decodes = [decoding(first, logged(1, both[4:], LENGTH))]
    found = await choices(client, stream=stream, prompt="hé", echo=True, max_tokens=2, logprobs=1)
    parts = [choice.logprobs for choice in found if choice.logprobs is not None]
    assert "".join(choice.text for choice in found) == "héA!"
    assert [token for part in parts for token in part.tokens] == ["h", "bytes:\\xc3", "bytes:\\xa9", "A", "!"]
    assert [value for part in parts for value in part.token_logprobs] == [None, *(-token for token in both[1:])]
    assert [offset for part in parts for offset in part.text_offset] == [0, 1, 1, 2, 3]
    top = [top for part in parts for top in part.top_logprobs]
    assert top[0] is None and top[3] == {"A": -both[3], "x": -0.5} and len(top) == 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", [STOP, LENGTH])
async def test_an_echo_of_no_tokens_is_the_prompt_alone(
    world: Scene, client: openai.AsyncOpenAI, stream: bool, reason: int
) -> None:
    """What evaluation tools ask. The one token that is computed, whatever it is, is neither shown nor counted."""
    world.decode.decodes = [decoding(foretold(logged(0, [END if reason == STOP else HELLO[0]], reason), "hi"))]
    found = await choices(client, stream=stream, prompt="hi", echo=True, max_tokens=0, logprobs=1, stop="hi")
    parts = [choice.logprobs for choice in found if choice.logprobs is not None]
    assert ("".join(choice.text for choice in found), found[-1].finish_reason) == ("hi", "length")
    assert [value for part in parts for value in part.token_logprobs] == [None, -ids("i")[0]]
    assert world.decode.decode_requests[0].sequence.max_new_tokens == 1
    metrics = world.gateway.mesh.metrics.exposition().decode()
    assert 'diptych_tokens_total{kind="completion"} 0.0' in metrics


async def test_a_worker_that_does_not_tell_of_the_whole_prompt_is_an_error(
    world: Scene, http: httpx.AsyncClient
) -> None:
    world.decode.decodes = [decoding(foretold(logged(0, HELLO, LENGTH), "h"))]
    answer = await http.post(TEXT_PATH, json=TEXT | {"echo": True, "logprobs": 0})
    assert answer.status_code == 500 and "2 prompt tokens" in answer.json()["error"]["message"]


async def test_logprobs_are_null_when_nobody_asked(world: Scene, http: httpx.AsyncClient) -> None:
    world.decode.decodes = [decoding(tokens(0, HELLO, LENGTH)) for _ in range(2)]
    for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
        assert (await http.post(path, json=body)).json()["choices"][0]["logprobs"] is None
        assert not world.decode.decode_requests[-1].sequence.sampling.HasField("logprobs")


async def test_penalties_and_bias_reach_both_legs(world: Scene, http: httpx.AsyncClient) -> None:
    world.decode.decodes = [decoding(tokens(0, HELLO, LENGTH))]
    more = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.25, "logit_bias": {"7": -100}}
    assert (await http.post(TEXT_PATH, json=TEXT | more)).status_code == 200
    sent = world.decode.decode_requests[0].sequence
    assert (sent.sampling.presence_penalty, sent.sampling.frequency_penalty) == (0.5, -1.0)
    assert sent.sampling.repetition_penalty == 1.25 and dict(sent.sampling.logit_bias) == {7: -100.0}
    assert sent.prompt_tokens == 2


async def test_an_error_in_mid_stream_ends_it_without_an_end_mark(world: Scene, http: httpx.AsyncClient) -> None:
    world.decode.decodes = [failing_decode(grpc.StatusCode.INTERNAL, tokens(0, HELLO[:2]))]
    answer = await http.post(CHAT_PATH, json=CHAT | {"stream": True})
    *chunks, last = (json.loads(event) for event in events(answer.text))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "He"
    assert last["error"]["type"] == "server_error"
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)


async def test_an_error_in_an_unstreamed_answer_is_no_200(world: Scene, http: httpx.AsyncClient) -> None:
    world.decode.decodes = [failing_decode(grpc.StatusCode.INTERNAL, tokens(0, HELLO[:2]))]
    assert (await http.post(CHAT_PATH, json=CHAT)).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answering", [False, True], ids=["before the first token", "in the answer"])
async def test_a_client_that_goes_away_ends_both_legs(world: Scene, stream: bool, answering: bool) -> None:
    world.scheduler.pairs = [(world.prefill, world.decode)]
    world.prefill.prefills = [endless_prefill]
    sent = [tokens(0, HELLO)] if answering else []
    world.decode.decodes = [endless_decode(*sent)]
    host, port = world.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(CHAT | {"stream": stream}).encode()
    head = (
        f"POST {CHAT_PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    if stream and answering:
        await asyncio.wait_for(reader.readuntil(b"Hello"), 5)
    else:
        await asyncio.wait_for(world.decode.begun.wait(), 5)
    await asyncio.wait_for(world.prefill.begun.wait(), 5)
    writer.close()
    assert await over(world.decode.ended) == "decode" and await over(world.prefill.ended) == "prefill"
    assert await over(world.scheduler.finished) == "request1"
    metrics = world.gateway.mesh.metrics.exposition().decode()
    assert 'diptych_requests_total{outcome="CANCELLED"} 1.0' in metrics and "diptych_requests_in_flight 0.0" in metrics


async def test_a_client_that_goes_away_while_queued_leaves_the_line(world: Scene, http: httpx.AsyncClient) -> None:
    world.scheduler.hold = asyncio.Event()
    asking = asyncio.ensure_future(http.post(CHAT_PATH, json=CHAT))
    await asyncio.wait_for(world.scheduler.in_line.wait(), 5)
    asking.cancel()
    await asyncio.wait_for(world.scheduler.left_line.wait(), 5)


async def test_models_are_those_of_live_workers(world: Scene, client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == []
    world.add_views()
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["tiny"]
    assert models[0].model_extra == {"context_tokens": 50}, "the smallest context of all"


@pytest.mark.parametrize(
    ("state", "model", "status"),
    [
        (worker_pb2.WORKER_STATE_READY, "tiny", 200),
        (worker_pb2.WORKER_STATE_STARTING, "tiny", 503),
        (worker_pb2.WORKER_STATE_DRAINING, "tiny", 503),
        (worker_pb2.WORKER_STATE_READY, "other", 503),
    ],
)
async def test_ready_means_that_a_request_can_be_served(
    world: Scene, http: httpx.AsyncClient, state: int, model: str, status: int
) -> None:
    assert (await http.get("/ready")).status_code == 503, "no worker lives"
    world.add_views(state=state, model=model)
    assert (await http.get("/ready")).status_code == status


async def test_expected_prefill_workers_are_waited_for() -> None:
    async with scene(expect_prefill=2) as world, httpx.AsyncClient(base_url=world.http) as http:
        world.add_views()
        answer = await http.get("/ready")
        assert answer.status_code == 503 and answer.json()["reason"] == "1 of 2 prefill workers are ready"


async def test_without_a_scheduler_nothing_is_ready_but_the_process_lives(
    world: Scene, http: httpx.AsyncClient
) -> None:
    world.add_views()
    await world.servers["scheduler"].stop(0.0)
    assert (await http.get("/ready")).status_code == 503
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/v1/models")).status_code == 503


async def test_metrics_count_tokens_and_outcomes(world: Scene, http: httpx.AsyncClient) -> None:
    world.decode.decodes = [decoding(tokens(0, HELLO, LENGTH))]
    await http.post(TEXT_PATH, json=TEXT)
    await http.post(TEXT_PATH, json=TEXT | {"top_p": 2})
    metrics = (await http.get("/metrics")).text
    for line in (
        'diptych_requests_total{outcome="length"} 1.0',
        'diptych_requests_total{outcome="INVALID_ARGUMENT"} 1.0',
        'diptych_tokens_total{kind="prompt"} 2.0',
        'diptych_tokens_total{kind="completion"} 5.0',
        "diptych_time_to_first_token_seconds_count 1.0",
        "diptych_requests_in_flight 0.0",
    ):
        assert line in metrics, metrics


async def test_a_draining_gateway_finishes_what_it_has_and_refuses_the_rest(
    world: Scene, http: httpx.AsyncClient
) -> None:
    go_on = asyncio.Event()
    world.decode.decodes = [decoding(tokens(0, HELLO, LENGTH), after=go_on)]
    running = asyncio.ensure_future(http.post(TEXT_PATH, json=TEXT))
    await asyncio.wait_for(world.decode.begun.wait(), 5)
    draining = asyncio.ensure_future(world.gateway.drain(10.0))
    await asyncio.sleep(0)
    assert (await http.post(TEXT_PATH, json=TEXT)).status_code == 503
    assert (await http.get("/ready")).status_code == 503
    go_on.set()
    assert (await running).status_code == 200
    await draining


async def test_the_seed_of_prefilled_answers_is_the_one_asked_for(world: Scene, client: openai.AsyncOpenAI) -> None:
    world.scheduler.pairs = [(world.prefill, world.decode)]
    world.prefill.prefills, world.decode.decodes = [prefilling(HELLO[0], LENGTH)], [endless_decode()]
    answer = await client.completions.create(model="tiny", prompt="hi", max_tokens=1, seed=7)
    assert answer.choices[0].text == "H" and answer.usage is not None and answer.usage.completion_tokens == 1
    assert world.prefill.prefill_requests[0].sequence.sampling.seed == 7
