"""Several answers of one prompt before scripted peers: who brings the KV, who follows, what a loss costs. Case F6."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import grpc
import grpc.aio
import httpx
import openai
import pytest
from diptych.v1 import decode_pb2, gateway_pb2, request_pb2
from gateway_peers import (
    END,
    LENGTH,
    STOP,
    DecodeScript,
    Scene,
    ScriptedWorker,
    decoding,
    endless_decode,
    failing_decode,
    failing_prefill,
    ids,
    prefilling,
    scene,
    tokens,
)

from services.gateway.request import answer_seed

CODE = grpc.StatusCode
WORDS = ["Hello", "Howdy", "Hi!!!", "Hurra"]
ID = ["request1", "request1-1", "request1-2", "request1-3"]
SEED = 4711


@pytest.fixture
async def world() -> AsyncIterator[Scene]:
    async with scene() as built:
        yield built


def ask(**fields: object) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(**({"text": "hi", "max_tokens": 5, "answers": 4} | fields))  # type: ignore[arg-type]


async def answer(world: Scene, request: gateway_pb2.GenerateRequest) -> list[gateway_pb2.GenerateResponse]:
    return [message async for message in world.stub.Generate(request, timeout=20)]


def texts(messages: list[gateway_pb2.GenerateResponse], answers: int = 4) -> list[str]:
    return ["".join(m.text for m in messages if m.index == index) for index in range(answers)]


def finishes(messages: list[gateway_pb2.GenerateResponse]) -> dict[int, gateway_pb2.Finish]:
    """By answer; each has one, on its last message."""
    found = {m.index: m.finish for m in messages if m.HasField("finish")}
    assert len(found) == sum(m.HasField("finish") for m in messages)
    for index in found:
        assert [m for m in messages if m.index == index][-1].HasField("finish")
    return found


def script(worker: ScriptedWorker, by_id: Mapping[str, DecodeScript]) -> None:
    """Gives each answer its own decode leg, in whatever order they come. An answer that has none is an error."""

    async def choose(
        request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        async for message in by_id[request.sequence.request_id](request, context):
            yield message

    worker.decodes = [choose for _ in by_id]


def whole(word: str) -> DecodeScript:
    return decoding(tokens(0, ids(word[:2])), tokens(2, ids(word[2:]), LENGTH))


async def until_finished(world: Scene, *request_ids: str) -> None:
    heard = {await asyncio.wait_for(world.scheduler.finished.get(), 5) for _ in request_ids}
    assert heard == set(request_ids)


def by_request(worker: ScriptedWorker) -> dict[str, decode_pb2.DecodeRequest]:
    return {request.sequence.request_id: request for request in worker.decode_requests}


async def test_four_answers_are_placed_prefilled_and_handed_over_once(world: Scene) -> None:
    world.prefill.prefills = [prefilling(ids("H")[0])]
    script(world.decode, dict(zip(ID, map(whole, WORDS), strict=True)))
    messages = await answer(world, ask(client_request_id="mine"))
    assert texts(messages) == WORDS
    (placed,) = world.scheduler.placed
    assert (placed.answers, placed.prompt_tokens, placed.max_new_tokens) == (4, 2, 5)
    assert len(world.prefill.prefill_requests) == 1
    asked = by_request(world.decode)
    assert next(iter(asked)) == ID[0] and set(asked) == set(ID)
    assert [request_id for request_id, request in asked.items() if request.HasField("hand_off")] == [ID[0]]
    for index, request_id in enumerate(ID):
        sequence = asked[request_id].sequence
        assert list(sequence.token_ids) == ids("hi") and (sequence.prompt_tokens, sequence.max_new_tokens) == (2, 5)
        assert sequence.sampling.seed == answer_seed(SEED, index)
        assert asked[request_id].worker == world.decode.ref
    await until_finished(world, ID[0])
    assert [m.request_id for m in messages if m.request_id] == ["request1"] and messages[0].request_id


async def test_each_answer_has_a_finish_and_the_prompt_is_counted_once(world: Scene) -> None:
    world.prefill.prefills = [prefilling(ids("H")[0])]
    script(world.decode, dict(zip(ID, map(whole, WORDS), strict=True)))
    found = finishes(await answer(world, ask(client_request_id="mine")))
    assert sorted(found) == [0, 1, 2, 3]
    assert found[0].usage == request_pb2.Usage(prompt_tokens=2, completion_tokens=5, cached_tokens=1)
    assert all(found[i].usage == request_pb2.Usage(completion_tokens=5) for i in (1, 2, 3))
    assert all(one.reason == LENGTH and one.client_request_id == "mine" for one in found.values())
    assert found[0].phases.transfer.bytes == 1000 and found[0].phases.prefill_worker == "prefill-0"
    for index in (1, 2, 3):
        phases = found[index].phases
        assert not phases.HasField("transfer") and phases.placements == 1
        assert phases.prefill_worker == phases.decode_worker == "decode-0"
        assert "another answer" in phases.local_prefill_reason


async def test_the_others_start_only_when_decode_has_the_kv(world: Scene) -> None:
    """Prefill has answered and nothing of the KV has come: whoever started now would compute the whole prompt."""
    arrived, started = asyncio.Event(), 0

    async def first(request: object, context: object) -> AsyncIterator[decode_pb2.DecodeResponse]:
        nonlocal started
        await arrived.wait()
        started = len(world.decode.decode_requests)
        yield tokens(0, ids("He"))
        yield tokens(2, ids("llo"), LENGTH)

    world.prefill.prefills = [prefilling(ids("H")[0])]
    script(world.decode, {ID[0]: first} | {ID[i]: whole(WORDS[i]) for i in (1, 2, 3)})
    received = []
    async for message in world.stub.Generate(ask(), timeout=20):
        if not received:
            assert message.text == "H", "prefill's first token"
            arrived.set()
        received.append(message)
    assert started == 1
    assert texts(received) == WORDS


@pytest.mark.parametrize("by_decode", [False, True])
async def test_an_answer_that_ends_with_its_first_token_leaves_the_kv_to_the_next_one(
    world: Scene, by_decode: bool
) -> None:
    """Whichever leg says so first: decode tells of the end, too, and has no KV then."""
    never = asyncio.Event()
    end, h = ids("H")[0], ids("H")[0]
    world.prefill.prefills = [
        prefilling(end, STOP, after=never if by_decode else world.decode.begun),
        prefilling(h),
    ]
    first = decoding(tokens(0, [end], STOP)) if by_decode else endless_decode()
    script(world.decode, {ID[0]: first} | {ID[i]: whole(WORDS[i]) for i in (1, 2, 3)})
    messages = await answer(world, ask())
    assert texts(messages) == ["H", *WORDS[1:]]
    assert [(p.request_id, p.attempt, p.answers) for p in world.scheduler.placed] == [(ID[0], 1, 4), (ID[1], 1, 3)]
    asked = by_request(world.decode)
    assert [i for i in ID if asked[i].HasField("hand_off")] == [ID[0], ID[1]]
    assert sum(one.usage.prompt_tokens for one in finishes(messages).values()) == 2
    await until_finished(world, ID[0], ID[1])


async def test_a_local_prefill_is_shared_even_if_its_answer_is_one_token(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode)]
    script(world.decode, {ID[i]: decoding(tokens(0, ids(WORDS[i][:1]), LENGTH)) for i in range(4)})
    assert texts(await answer(world, ask(max_tokens=1))) == ["H"] * 4
    assert len(world.scheduler.placed) == 1


async def test_a_lost_hand_off_is_placed_again_for_all_of_them(world: Scene) -> None:
    world.scheduler.pairs = [(world.prefill, world.decode), (None, world.spare)]
    world.prefill.prefills = [failing_prefill(CODE.UNAVAILABLE, after=world.decode.begun)]
    script(world.decode, {ID[0]: endless_decode()})
    script(world.spare, dict(zip(ID, map(whole, WORDS), strict=True)))
    messages = await answer(world, ask())
    assert texts(messages) == WORDS
    assert [(p.request_id, p.attempt, p.answers) for p in world.scheduler.placed] == [(ID[0], 1, 4), (ID[0], 2, 4)]
    assert finishes(messages)[0].phases.placements == 2 and finishes(messages)[3].phases.placements == 1


async def test_a_worker_that_dies_in_mid_answers_costs_each_of_them_a_placement_of_its_own(world: Scene) -> None:
    """Answer 2 is over by then. The others go on after their own tokens."""
    died = asyncio.Event()
    world.scheduler.pairs = [(world.prefill, world.decode), (None, world.spare)]
    world.prefill.prefills = [prefilling(ids("H")[0])]
    script(
        world.decode,
        {ID[i]: failing_decode(CODE.UNAVAILABLE, tokens(0, ids(WORDS[i])[: i + 1]), after=died) for i in (0, 1, 3)}
        | {ID[2]: whole(WORDS[2])},
    )
    script(world.spare, {ID[i]: decoding(tokens(0, ids(WORDS[i])[i + 1 :], LENGTH)) for i in (0, 1, 3)})
    received = []
    async for message in world.stub.Generate(ask(), timeout=20):
        received.append(message)
        if set(finishes(received)) == {2} and all(texts(received)):
            died.set()
    assert texts(received) == WORDS
    first, *again = world.scheduler.placed
    assert {(p.request_id, p.answers, p.prompt_tokens) for p in again} == {(ID[i], 1, 2 + i + 1) for i in (0, 1, 3)}
    assert {(p.request_id, p.attempt) for p in again} == {(ID[0], 2), (ID[1], 1), (ID[3], 1)}
    assert all(list(p.avoid) == [world.decode.ref] for p in again) and first.answers == 4
    for index in (0, 1, 3):
        sequence = by_request(world.spare)[ID[index]].sequence
        assert list(sequence.token_ids) == ids("hi") + ids(WORDS[index])[: index + 1]
        assert sequence.sampling.seed == answer_seed(SEED, index) and sequence.prompt_tokens == 2
    await until_finished(world, ID[0], ID[1], ID[3])


async def test_an_answer_that_a_stop_string_ends_stops_alone(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode)]
    go_on = asyncio.Event()
    late = decoding(tokens(0, ids(WORDS[0]), LENGTH), after=go_on)

    async def first(request: object, context: object) -> AsyncIterator[decode_pb2.DecodeResponse]:
        yield tokens(0, ids("H"))
        await go_on.wait()
        yield tokens(1, ids("ello"), LENGTH)

    script(world.decode, {ID[0]: first, ID[1]: endless_decode(tokens(0, ids("How"))), ID[2]: late, ID[3]: late})
    received = []
    async for message in world.stub.Generate(ask(stop=["w"]), timeout=20):
        received.append(message)
        if set(finishes(received)) == {1}:
            assert await asyncio.wait_for(world.decode.ended.get(), 5) == "decode", "its leg is cancelled"
            go_on.set()
    assert texts(received) == ["Hello", "Ho", "Hello", "Hello"]
    assert finishes(received)[1].reason == STOP and finishes(received)[0].reason == LENGTH


async def test_a_client_that_goes_away_ends_all_answers(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode)]
    script(world.decode, {request_id: endless_decode(tokens(0, ids("H"))) for request_id in ID})
    call = world.stub.Generate(ask(), timeout=20)
    seen: set[int] = set()
    while len(seen) < 4:
        message = await call.read()
        assert isinstance(message, gateway_pb2.GenerateResponse)
        seen.add(message.index)
    call.cancel()
    assert [await asyncio.wait_for(world.decode.ended.get(), 5) for _ in ID] == ["decode"] * 4
    await until_finished(world, ID[0])


async def test_an_error_of_one_answer_is_the_requests_and_ends_the_others(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode)]
    script(
        world.decode,
        {ID[i]: endless_decode(tokens(0, ids("H"))) for i in (0, 1, 3)} | {ID[2]: failing_decode(CODE.INTERNAL)},
    )
    with pytest.raises(grpc.aio.AioRpcError, match="scripted") as raised:
        await answer(world, ask())
    assert raised.value.code() == CODE.INTERNAL
    assert len([await asyncio.wait_for(world.decode.ended.get(), 5) for _ in ID]) == 4
    await until_finished(world, ID[0])


async def test_the_first_answer_failing_for_good_starts_no_other(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode)]
    world.decode.decodes = [failing_decode(CODE.UNAVAILABLE) for _ in range(4)]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answer(world, ask())
    assert raised.value.code() == CODE.UNAVAILABLE
    assert [r.sequence.request_id for r in world.decode.decode_requests] == [ID[0]] * 2


@pytest.mark.parametrize("answers", [17, 2**32 - 1])
async def test_more_answers_than_the_limit_are_refused_by_name(world: Scene, answers: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=rf"answers: {answers} is not in \[1, 16\]") as raised:
        await answer(world, ask(answers=answers))
    assert raised.value.code() == CODE.INVALID_ARGUMENT and not world.scheduler.placed


async def test_the_prompts_logprobs_come_once_with_answer_0(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode)]
    first = tokens(0, ids("He"))
    first.logprobs.extend(request_pb2.TokenLogprobs(logprob=-1.0) for _ in range(2))
    first.begin.prompt_logprobs.add(logprob=-7.0)
    other = tokens(0, ids("Hi"), LENGTH)
    other.logprobs.extend(request_pb2.TokenLogprobs(logprob=-2.0) for _ in range(2))
    script(world.decode, {ID[0]: endless_decode(first), ID[1]: decoding(other)})
    told: list[tuple[int, float]] = []
    own: list[tuple[int, float]] = []
    sampling = request_pb2.SamplingParams(logprobs=0, prompt_logprobs=0)
    call = world.stub.Generate(ask(answers=2, sampling=sampling), timeout=20)
    async for message in call:
        told += [(message.index, one.logprob) for one in message.prompt_logprobs]
        own += [(message.index, one.logprob) for one in message.logprobs]
        if message.HasField("finish"):
            call.cancel()
            break
    assert told == [(0, -7.0)]
    assert sorted(own) == [(0, -1.0)] * 2 + [(1, -2.0)] * 2
    asked = by_request(world.decode)
    assert asked[ID[0]].sequence.sampling.HasField("prompt_logprobs")
    assert not asked[ID[1]].sequence.sampling.HasField("prompt_logprobs"), "decode would compute the prompt again"


@pytest.fixture
async def client(world: Scene) -> AsyncIterator[openai.AsyncOpenAI]:
    world.scheduler.pairs = [(None, world.decode)]
    async with openai.AsyncOpenAI(base_url=f"{world.http}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


async def test_the_openai_client_reads_n_choices_and_one_usage(world: Scene, client: openai.AsyncOpenAI) -> None:
    script(world.decode, dict(zip(ID, map(whole, WORDS), strict=True)))
    found = await client.completions.create(model="tiny", prompt="hi", n=4)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in found.choices] == [
        (index, word, "length") for index, word in enumerate(WORDS)
    ]
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (2, 20, 22)
    metrics = world.gateway.mesh.metrics.exposition().decode()
    for line in (
        'diptych_requests_total{outcome="length"} 1.0',
        'diptych_tokens_total{kind="prompt"} 2.0',
        'diptych_tokens_total{kind="completion"} 20.0',
        "diptych_time_per_token_seconds_count 4.0",
        "diptych_time_to_first_token_seconds_count 1.0",
        "diptych_request_seconds_count 1.0",
    ):
        assert line in metrics


async def test_the_openai_client_streams_n_choices_each_with_role_and_end_and_one_usage_behind_all(
    world: Scene, client: openai.AsyncOpenAI
) -> None:
    script(world.decode, dict(zip(ID, map(whole, WORDS), strict=True)))
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        n=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = [chunk async for chunk in stream]
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 20
    choices = [choice for part in parts for choice in part.choices]
    for index, word in enumerate(WORDS):
        own = [choice for choice in choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == word
        assert own[0].delta.role == "assistant" and not any(choice.delta.role for choice in own[1:])
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["length"]
        assert own[-1].finish_reason == "length"


async def test_the_end_mark_comes_once_behind_the_last_answer(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode)]
    script(world.decode, dict(zip(ID, map(whole, WORDS), strict=True)))
    body = {"model": "tiny", "prompt": "hi", "n": 4, "stream": True}
    async with httpx.AsyncClient(base_url=world.http, timeout=20) as http:
        text = (await http.post("/v1/completions", json=body)).text
    assert text.count("[DONE]") == 1 and text.endswith("data: [DONE]\n\n")
    assert text.count('"finish_reason":"length"') == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_echoes_the_prompt_with_the_logprobs_that_the_first_one_brought(
    world: Scene, client: openai.AsyncOpenAI, stream: bool
) -> None:
    def logged(word: str) -> decode_pb2.DecodeResponse:
        message = tokens(0, ids(word), LENGTH)
        message.logprobs.extend(request_pb2.TokenLogprobs(logprob=-token) for token in ids(word))
        return message

    first = logged("He")
    first.begin.prompt_logprobs.add(logprob=-7.0)
    script(world.decode, {ID[0]: decoding(first), ID[1]: decoding(logged("Ho"))})
    wish = {"model": "tiny", "prompt": "hi", "n": 2, "echo": True, "logprobs": 0, "max_tokens": 2}
    if stream:
        chunks = await client.completions.create(stream=True, **wish)
        choices = [choice async for chunk in chunks for choice in chunk.choices]
    else:
        choices = (await client.completions.create(**wish)).choices
    for index, word in enumerate(("He", "Ho")):
        own = [choice for choice in choices if choice.index == index]
        assert "".join(choice.text for choice in own) == "hi" + word
        values = [v for choice in own if choice.logprobs for v in choice.logprobs.token_logprobs]
        assert values == [None, -7.0, *(-token for token in ids(word))]
    assert not by_request(world.decode)[ID[1]].sequence.sampling.HasField("prompt_logprobs")


async def test_an_end_token_of_one_answer_is_not_the_others(world: Scene, client: openai.AsyncOpenAI) -> None:
    script(world.decode, {ID[0]: decoding(tokens(0, [*ids("Hi"), END], STOP)), ID[1]: whole("Hello")})
    found = await client.completions.create(model="tiny", prompt="hi", n=2)
    assert [(c.text, c.finish_reason) for c in found.choices] == [("Hi", "stop"), ("Hello", "length")]
