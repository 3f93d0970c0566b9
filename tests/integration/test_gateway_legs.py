"""The gateway before scripted peers: orders of events that are hard to get from real ones. Cases G2 to G5."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from diptych.v1 import decode_pb2, gateway_pb2, prefill_pb2, request_pb2
from gateway_peers import (
    CONTEXT_TOKENS,
    END,
    LENGTH,
    STOP,
    PrefillScript,
    Scene,
    decoding,
    endless_decode,
    endless_prefill,
    failing_decode,
    failing_prefill,
    ids,
    prefilling,
    scene,
    tokens,
)

HELLO = ids("Hello")
CODE = grpc.StatusCode


@pytest.fixture
async def world() -> AsyncIterator[Scene]:
    async with scene() as built:
        yield built


def ask(text: str = "hi", **fields: object) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(text=text, **fields)  # type: ignore[arg-type]


async def answer(world: Scene, request: gateway_pb2.GenerateRequest) -> list[gateway_pb2.GenerateResponse]:
    return [message async for message in world.stub.Generate(request, timeout=20)]


async def refusal(world: Scene, request: gateway_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answer(world, request)
    return raised.value


def text_of(messages: list[gateway_pb2.GenerateResponse]) -> str:
    return "".join(message.text for message in messages)


def ids_of(messages: list[gateway_pb2.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


async def over(queue: asyncio.Queue[str]) -> str:
    return await asyncio.wait_for(queue.get(), 5)


async def test_both_legs_make_one_answer_with_usage_and_phases(world: Scene) -> None:
    world.prefill.prefills = [prefilling(HELLO[0])]
    world.decode.decodes = [decoding(tokens(0, HELLO[:2]), tokens(2, HELLO[2:], LENGTH))]
    messages = await answer(world, ask(max_tokens=5, client_request_id="mine"))
    assert text_of(messages) == "Hello" and ids_of(messages) == HELLO
    assert messages[0].request_id == "request1" and not any(m.request_id for m in messages[1:])
    finish = messages[-1].finish
    assert finish.reason == LENGTH and finish.client_request_id == "mine"
    assert finish.usage == request_pb2.Usage(prompt_tokens=2, completion_tokens=5, cached_tokens=1)
    phases = finish.phases
    assert (phases.prefill_worker, phases.decode_worker, phases.placements) == ("prefill-0", "decode-0", 1)
    assert phases.transfer.bytes == 1000 and phases.queue.ToMilliseconds() == 250
    assert phases.prefill_compute.ToMilliseconds() == 500 and phases.prefill_chunks == 1
    assert phases.HasField("time_per_token") and phases.total.ToNanoseconds() >= phases.first_token.ToNanoseconds() > 0
    assert await over(world.scheduler.finished) == "request1"


async def test_a_decode_leg_that_ends_by_itself_is_not_cancelled(world: Scene) -> None:
    ended: list[str] = []

    async def script(request: object, context: object) -> AsyncIterator[decode_pb2.DecodeResponse]:
        try:
            yield tokens(0, HELLO, LENGTH)
            await asyncio.sleep(0.2)
            ended.append("by itself")
        except (asyncio.CancelledError, GeneratorExit):
            ended.append("cancelled")
            raise

    world.prefill.prefills = [prefilling(HELLO[0])]
    world.decode.decodes = [script]
    assert text_of(await answer(world, ask(max_tokens=5))) == "Hello"
    assert {await over(world.prefill.ended), await over(world.decode.ended)} == {"prefill", "decode"}
    assert ended == ["by itself"]


async def test_legs_get_the_sequence_the_seed_and_the_hand_off(world: Scene) -> None:
    world.prefill.prefills = [prefilling(END, STOP, after=world.decode.begun)]
    world.decode.decodes = [endless_decode()]
    await answer(world, ask(tenant="t", priority=3))
    sent, decode = world.prefill.prefill_requests[0], world.decode.decode_requests[0]
    assert sent.sequence == decode.sequence
    assert list(sent.sequence.token_ids) == ids("hi") and list(sent.sequence.stop_token_ids) == [END]
    assert sent.sequence.sampling.seed == 4711 and sent.sequence.max_new_tokens == CONTEXT_TOKENS - 2
    assert (sent.sequence.tenant, sent.sequence.priority) == ("t", 3)
    assert decode.hand_off.transfer_id == sent.transfer_id == "transfer-1"
    assert decode.hand_off.sender == world.prefill.ref and decode.worker == world.decode.ref


LOGGED = {"sampling": request_pb2.SamplingParams(logprobs=0, prompt_logprobs=0)}


def with_logprobs(message: decode_pb2.DecodeResponse, *values: float) -> decode_pb2.DecodeResponse:
    message.logprobs.extend(request_pb2.TokenLogprobs(logprob=value) for value in values)
    return message


def told_by_prefill(after: asyncio.Event | None = None) -> PrefillScript:
    """A prefill leg with log-probabilities of the prompt's second token and of the first new one."""

    async def script(request: object, context: object) -> prefill_pb2.PrefillResponse:
        answer = await prefilling(HELLO[0], after=after)(request, context)
        answer.logprobs.logprob = -1.0
        answer.prompt_logprobs.add(logprob=-7.0)
        return answer

    return script


def logprobs_of(messages: list[gateway_pb2.GenerateResponse]) -> list[float]:
    return [logprobs.logprob for message in messages for logprobs in message.logprobs]


def told_of_prompt(messages: list[gateway_pb2.GenerateResponse]) -> list[list[float]]:
    return [[logprobs.logprob for logprobs in message.prompt_logprobs] for message in messages]


async def test_tokens_of_decode_wait_for_what_prefill_alone_can_tell(world: Scene) -> None:
    """Decode says all it has before prefill answers: without the wait the first token would come without its own."""
    said = asyncio.Event()

    async def decode(request: object, context: object) -> AsyncIterator[decode_pb2.DecodeResponse]:
        yield with_logprobs(tokens(0, HELLO[:2]), 0.0, -2.0)
        yield with_logprobs(tokens(2, HELLO[2:], LENGTH), -3.0, -4.0, -5.0)
        said.set()

    world.prefill.prefills, world.decode.decodes = [told_by_prefill(after=said)], [decode]
    messages = await answer(world, ask(max_tokens=5, **LOGGED))
    assert ids_of(messages) == HELLO
    assert logprobs_of(messages) == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert told_of_prompt(messages) == [[-7.0]] + [[]] * (len(messages) - 1)


async def test_decode_does_not_hear_that_the_prompts_logprobs_are_wanted(world: Scene) -> None:
    """F5."""
    world.prefill.prefills = [told_by_prefill()]
    world.decode.decodes = [decoding(with_logprobs(tokens(0, HELLO[:2], LENGTH), 0.0, -2.0))]
    assert told_of_prompt(await answer(world, ask(max_tokens=2, **LOGGED)))[0] == [-7.0]
    prefill, decode = world.prefill.prefill_requests[0].sequence, world.decode.decode_requests[0].sequence
    assert prefill.sampling.HasField("prompt_logprobs") and not decode.sampling.HasField("prompt_logprobs")
    prefill.sampling.ClearField("prompt_logprobs")
    assert prefill == decode


async def test_a_prefill_leg_that_fails_before_it_has_told_is_placed_again_although_decode_has_tokens(
    world: Scene,
) -> None:
    world.scheduler.pairs = [(world.prefill, world.decode), (None, world.spare)]
    world.prefill.prefills = [failing_prefill(CODE.UNAVAILABLE, after=world.decode.begun)]
    world.decode.decodes = [endless_decode(with_logprobs(tokens(0, HELLO[:2]), 0.0, -2.0))]
    local = with_logprobs(tokens(0, HELLO, LENGTH), -1.0, -2.0, -3.0, -4.0, -5.0)
    local.begin.prompt_logprobs.add(logprob=-7.0)
    world.spare.decodes = [decoding(local)]
    messages = await answer(world, ask(max_tokens=5, **LOGGED))
    assert ids_of(messages) == HELLO and logprobs_of(messages) == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert told_of_prompt(messages)[0] == [-7.0]


async def test_after_a_loss_in_the_answer_its_tokens_stay_the_answers_and_the_prompt_is_not_told_again(
    world: Scene,
) -> None:
    world.scheduler.pairs = [(None, world.decode), (None, world.spare)]
    first = with_logprobs(tokens(0, HELLO[:2]), -1.0, -2.0)
    first.begin.prompt_logprobs.add(logprob=-7.0)
    world.decode.decodes = [failing_decode(CODE.UNAVAILABLE, first)]
    world.spare.decodes = [decoding(with_logprobs(tokens(0, HELLO[2:], LENGTH), -3.0, -4.0, -5.0))]
    messages = await answer(world, ask(max_tokens=5, **LOGGED))
    assert ids_of(messages) == HELLO and logprobs_of(messages) == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert told_of_prompt(messages) == [[-7.0]] + [[]] * (len(messages) - 1)
    before, after = world.decode.decode_requests[0].sequence, world.spare.decode_requests[0].sequence
    assert (before.prompt_tokens, after.prompt_tokens) == (2, 2)
    assert list(after.token_ids) == [*ids("hi"), *HELLO[:2]]
    assert before.sampling.HasField("prompt_logprobs") and not after.sampling.HasField("prompt_logprobs")
    assert after.sampling.HasField("logprobs")


async def test_a_local_prefill_has_one_leg_and_says_why(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode)]
    world.decode.decodes = [decoding(tokens(0, HELLO, STOP))]
    finish = (await answer(world, ask()))[-1].finish
    assert not world.decode.decode_requests[0].HasField("hand_off")
    assert finish.phases.local_prefill_reason == "no prefill worker" and finish.phases.prefill_worker == "decode-0"
    assert finish.phases.prefill_chunks == 4 and finish.usage.cached_tokens == 2
    assert not finish.phases.HasField("transfer"), "nothing moved"


@pytest.mark.parametrize(("token", "reason", "shown"), [(END, STOP, ""), (HELLO[0], LENGTH, "H")])
async def test_a_first_token_that_ends_the_request_is_one_message(
    world: Scene, token: int, reason: int, shown: str
) -> None:
    world.prefill.prefills = [prefilling(token, reason, after=world.decode.begun)]
    world.decode.decodes = [endless_decode()]
    messages = await answer(world, ask(max_tokens=1 if reason == LENGTH else 9))
    assert len(messages) == 1 and messages[0].text == shown and ids_of(messages) == [token]
    assert messages[0].finish.reason == reason and messages[0].finish.usage.completion_tokens == 1
    assert sorted([await over(world.prefill.ended), await over(world.decode.ended)]) == ["decode", "prefill"]


async def test_a_first_token_that_completes_a_stop_string_ends_everything(world: Scene) -> None:
    world.prefill.prefills = [prefilling(HELLO[0], after=world.decode.begun)]
    world.decode.decodes = [endless_decode()]
    messages = await answer(world, ask(stop=["H"]))
    assert len(messages) == 1 and messages[0].text == "" and messages[0].finish.reason == STOP
    assert messages[0].finish.usage.completion_tokens == 1
    assert await over(world.decode.ended) == "decode"
    assert await over(world.scheduler.finished) == "request1"
    await world.gateway.mesh.closing.aclose()
    assert world.prefill.released == ["transfer-1"], "nobody comes for the KV any more"


async def test_decodes_first_token_may_come_before_prefills_answer(world: Scene) -> None:
    late = asyncio.Event()
    world.prefill.prefills = [prefilling(HELLO[0], after=late)]
    world.decode.decodes = [decoding(tokens(0, HELLO[:2]), tokens(2, HELLO[2:], LENGTH))]
    received = []
    async for message in world.stub.Generate(ask(), timeout=20):
        received.append(message)
        late.set()
    assert ids_of(received) == HELLO and received[-1].finish.usage.cached_tokens == 1
    assert received[-1].finish.phases.prefill_chunks == 1, "prefill's answer was waited for"


async def test_tokens_that_come_twice_are_shown_once(world: Scene) -> None:
    world.prefill.prefills = [prefilling(HELLO[0])]
    world.decode.decodes = [decoding(tokens(0, HELLO[:3]), tokens(1, HELLO[1:4]), tokens(0, HELLO, LENGTH))]
    messages = await answer(world, ask())
    assert text_of(messages) == "Hello" and messages[-1].finish.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([tokens(0, HELLO[:1]), tokens(2, HELLO[2:], LENGTH)], "missing"),
        ([tokens(0, ids("J")), tokens(1, HELLO[1:], LENGTH)], "disagree"),
        ([tokens(0, HELLO)], "without a finish"),
    ],
    ids=["gap", "contradiction", "no finish"],
)
async def test_a_broken_stream_is_an_error_and_never_an_answer(world: Scene, messages: list, problem: str) -> None:
    world.prefill.prefills, world.decode.decodes = [prefilling(HELLO[0])], [decoding(*messages)]
    error = await refusal(world, ask())
    assert error.code() == CODE.INTERNAL and problem in (error.details() or "")
    assert await over(world.scheduler.finished) == "request1"


@pytest.mark.parametrize("code", [CODE.UNAVAILABLE, CODE.ABORTED, CODE.FAILED_PRECONDITION, CODE.CANCELLED])
async def test_a_leg_lost_before_the_first_token_is_tried_once_elsewhere(world: Scene, code: CODE) -> None:
    world.scheduler.pairs = [(world.prefill, world.decode), (None, world.spare)]
    world.prefill.prefills = [endless_prefill]
    world.decode.decodes = [failing_decode(code, after=world.prefill.begun)]
    world.spare.decodes = [decoding(tokens(0, HELLO, LENGTH))]
    messages = await answer(world, ask())
    assert text_of(messages) == "Hello" and messages[-1].finish.phases.placements == 2
    assert await over(world.prefill.ended) == "prefill", "the other leg is cancelled"
    first, second = world.scheduler.placed
    assert (first.attempt, second.attempt) == (1, 2) and not first.avoid
    # A hand-off is lost by its sender.
    assert list(second.avoid) == [world.prefill.ref if code == CODE.ABORTED else world.decode.ref]
    assert world.decode.decode_requests[0].sequence == world.spare.decode_requests[0].sequence


async def test_before_the_first_token_there_is_one_retry_at_most(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode)]
    world.decode.decodes = [failing_decode(CODE.UNAVAILABLE) for _ in range(5)]
    error = await refusal(world, ask())
    assert error.code() == CODE.UNAVAILABLE and len(world.scheduler.placed) == 2


async def test_a_lost_hand_off_is_told_to_the_client_as_unavailable(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode)]
    world.decode.decodes = [failing_decode(CODE.ABORTED) for _ in range(2)]
    assert (await refusal(world, ask())).code() == CODE.UNAVAILABLE


@pytest.mark.parametrize("code", [CODE.INVALID_ARGUMENT, CODE.RESOURCE_EXHAUSTED, CODE.INTERNAL])
async def test_an_error_that_another_worker_would_repeat_is_passed_on(world: Scene, code: CODE) -> None:
    world.prefill.prefills = [failing_prefill(code, after=world.decode.begun)]
    world.decode.decodes = [endless_decode()]
    assert (await refusal(world, ask())).code() == code
    assert len(world.scheduler.placed) == 1
    assert await over(world.decode.ended) == "decode", "the other leg is cancelled"


async def test_after_the_first_token_the_answer_goes_on_where_it_was(world: Scene) -> None:
    world.scheduler.pairs = [(world.prefill, world.decode), (None, world.spare)]
    world.prefill.prefills = [prefilling(HELLO[0])]
    world.decode.decodes = [failing_decode(CODE.UNAVAILABLE, tokens(0, HELLO[:2]))]
    world.spare.decodes = [decoding(tokens(0, HELLO[2:], LENGTH))]
    messages = await answer(world, ask(max_tokens=5))
    assert text_of(messages) == "Hello" and ids_of(messages) == HELLO
    again = world.spare.decode_requests[0].sequence
    assert list(again.token_ids) == ids("hi") + HELLO[:2] and again.max_new_tokens == 3
    assert again.sampling.seed == 4711
    assert world.scheduler.placed[1].prompt_tokens == 4
    assert messages[-1].finish.usage.prompt_tokens == 2 and messages[-1].finish.usage.completion_tokens == 5


async def test_a_stop_string_and_a_character_are_matched_across_a_lost_leg(world: Scene) -> None:
    word = ids("é-STOP")
    world.scheduler.pairs = [(None, world.decode), (None, world.spare)]
    world.decode.decodes = [failing_decode(CODE.UNAVAILABLE, tokens(0, word[:1]))]
    world.spare.decodes = [endless_decode(tokens(0, word[1:4]), tokens(3, word[4:]))]
    messages = await answer(world, ask(stop=["-STOP"]))
    assert text_of(messages) == "é" and messages[-1].finish.reason == STOP
    assert messages[-1].finish.usage.completion_tokens == len(word)
    assert await over(world.spare.ended) == "decode"


async def test_after_the_first_token_there_are_three_placements_at_most(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode)]
    world.decode.decodes = [failing_decode(CODE.UNAVAILABLE, tokens(0, HELLO[:1])) for _ in range(5)]
    error = await refusal(world, ask())
    assert error.code() == CODE.UNAVAILABLE and len(world.scheduler.placed) == 3


async def test_a_prefill_leg_that_breaks_after_the_hand_off_does_not_matter(world: Scene) -> None:
    broken = asyncio.Event()

    async def break_later(request: object, context: grpc.aio.ServicerContext) -> object:
        await broken.wait()
        await context.abort(CODE.UNAVAILABLE, "scripted")

    go_on = asyncio.Event()

    async def decode(request: object, context: object) -> AsyncIterator[object]:
        yield tokens(0, HELLO[:2])
        await go_on.wait()
        yield tokens(2, HELLO[2:], LENGTH)

    world.prefill.prefills, world.decode.decodes = [break_later], [decode]
    received = []
    async for message in world.stub.Generate(ask(), timeout=20):
        received.append(message)
        if not go_on.is_set():
            broken.set()  # not before: the two legs' messages arrive in no order
            assert await over(world.prefill.ended) == "prefill"
            go_on.set()
    assert text_of(received) == "Hello" and received[-1].finish.phases.placements == 1


async def test_a_worker_that_dies_ends_the_leg_at_once(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode), (None, world.spare)]
    world.decode.decodes = [endless_decode(tokens(0, HELLO[:2]))]
    world.spare.decodes = [decoding(tokens(0, HELLO[2:], LENGTH))]
    received = []
    async for message in world.stub.Generate(ask(), timeout=20):
        if not received:
            await world.servers["decode"].stop(0.0)
        received.append(message)
    assert text_of(received) == "Hello" and received[-1].finish.phases.placements == 2


async def test_cancel_while_decoding_ends_both_legs_and_tells_the_scheduler(world: Scene) -> None:
    """K1 (decoding)."""
    world.prefill.prefills, world.decode.decodes = [endless_prefill], [endless_decode(tokens(0, HELLO[:1]))]
    call = world.stub.Generate(ask(), timeout=20)
    await call.read()
    await asyncio.wait_for(world.prefill.begun.wait(), 5)
    call.cancel()
    assert await over(world.decode.ended) == "decode" and await over(world.prefill.ended) == "prefill"
    assert await over(world.scheduler.finished) == "request1"


async def test_cancel_while_queued_leaves_the_line(world: Scene) -> None:
    """K1 (queued)."""
    world.scheduler.hold = asyncio.Event()
    call = world.stub.Generate(ask(), timeout=20)
    reading = asyncio.ensure_future(call.read())
    await asyncio.wait_for(world.scheduler.in_line.wait(), 5)
    call.cancel()
    await asyncio.wait_for(world.scheduler.left_line.wait(), 5)
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await over(world.scheduler.finished) == "request1"


@pytest.mark.parametrize("in_field", [True, False], ids=["field", "gRPC deadline"])
async def test_a_deadline_frees_everything(world: Scene, in_field: bool) -> None:
    world.prefill.prefills, world.decode.decodes = [endless_prefill], [endless_decode()]
    request = ask()
    if in_field:
        request.deadline.FromMilliseconds(200)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in world.stub.Generate(request, timeout=20 if in_field else 0.2):
            pass
    assert raised.value.code() == CODE.DEADLINE_EXCEEDED
    assert await over(world.decode.ended) == "decode" and await over(world.prefill.ended) == "prefill"
    assert await over(world.scheduler.finished) == "request1"


async def test_a_scheduler_that_says_no_is_passed_on_with_when_to_come_back(world: Scene) -> None:
    world.scheduler.failures = [(CODE.RESOURCE_EXHAUSTED, "the line is full", (("retry-after-ms", "2500"),))]
    error = await refusal(world, ask())
    assert error.code() == CODE.RESOURCE_EXHAUSTED and error.details() == "the line is full"
    assert ("retry-after-ms", "2500") in [tuple(pair) for pair in error.trailing_metadata() or ()]


async def test_a_scheduler_that_finds_nobody_is_believed_at_once(world: Scene) -> None:
    world.scheduler.failures = [(CODE.UNAVAILABLE, "no decode worker lives", ())] * 20
    error = await refusal(world, ask())
    assert error.code() == CODE.UNAVAILABLE and "no decode worker lives" in (error.details() or "")
    assert len(world.scheduler.placed) == 1


async def test_two_live_requests_with_one_client_id_are_two_requests(world: Scene) -> None:
    world.scheduler.pairs = [(None, world.decode)]
    world.decode.decodes = [decoding(tokens(0, HELLO, LENGTH)) for _ in range(2)]
    both = await asyncio.gather(*(answer(world, ask(client_request_id="same")) for _ in range(2)))
    assert {messages[0].request_id for messages in both} == {"request1", "request2"}
    assert all(messages[-1].finish.client_request_id == "same" for messages in both)
    assert {request.request_id for request in world.scheduler.placed} == {"request1", "request2"}


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"text": ""}, CODE.INVALID_ARGUMENT, "text"),
        ({"model": "other"}, CODE.NOT_FOUND, "'other'"),
        ({"max_tokens": 63}, CODE.INVALID_ARGUMENT, "prompt (2 tokens) + max_tokens (63) = 65"),
        ({"sampling": request_pb2.SamplingParams(temperature=float("nan"))}, CODE.INVALID_ARGUMENT, "temperature"),
        ({"stop": [""]}, CODE.INVALID_ARGUMENT, "stop"),
    ],
)
async def test_bad_input_is_refused_before_anybody_hears_of_it(
    world: Scene, fields: dict[str, object], code: CODE, said: str
) -> None:
    error = await refusal(world, ask(**({"text": "hi"} | fields)))  # type: ignore[arg-type]
    assert error.code() == code and said in (error.details() or "")
    assert not world.scheduler.placed
