"""The decode core: reservation, steps, local prefill beside decoding, giving way, and freeing in every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from decode_model import BLOCK, CoreMachine, Model, answers, core, expected, request, run
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from services.decode.core import DecodeCore
from services.decode.messages import (
    Began,
    Cancel,
    Drained,
    Event,
    Failed,
    Finished,
    Received,
    Reserved,
    Submit,
    Tokens,
    TransferFailed,
)
from services.decode.requests import GROWTH_TOKENS
from services.engine.sampling_spec import History, SamplingSpec, TokenLogprobs
from services.errors import HandOffLost, NotAdmitted
from services.schedule.catalog import policy_named
from services.worker.work import Computed, Work


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 17])
def test_a_local_request_is_computed_in_chunks_then_decoded_to_its_length(tokens: int) -> None:
    c, model = core(), Model()
    submit = request("a", tokens, max_new_tokens=6)
    c.apply(submit, 0.0)
    events = run(c, model)
    assert answers(events) == {"a": expected(submit)}
    (finished,) = [e for e in events if isinstance(e, Finished)]
    assert finished.reason == "length"
    (began,) = [e for e in events if isinstance(e, Began)]
    assert began.chunks == -(-tokens // 6)
    assert c.load().blocks.free == 64


def test_a_handed_over_request_goes_on_from_the_first_token() -> None:
    c, model = core(), Model()
    submit = request("a", 9, local=False)
    c.apply(submit, 0.0)
    assert model.step(c) == []
    (reserved,) = c.take_events()
    assert isinstance(reserved, Reserved) and len(reserved.blocks) == 3
    first = model.receive(c, reserved, submit.token_ids)
    c.apply(Received(key="a", first_token_id=first, finish=None), 1.0)
    events = run(c, model)
    assert answers(events) == {"a": expected(submit)}
    assert c.load().blocks.free == 64


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_request_that_ended_with_its_first_token_is_never_stepped(finish: str) -> None:
    c, model = core(), Model()
    c.apply(request("a", 9, local=False), 0.0)
    model.step(c)
    c.take_events()
    c.apply(Received(key="a", first_token_id=3, finish=finish), 1.0)  # type: ignore[arg-type]
    assert model.step(c) == []
    began, tokens, finished = c.take_events()
    assert isinstance(began, Began)
    assert isinstance(tokens, Tokens) and tokens.token_ids == (3,)
    assert isinstance(finished, Finished) and finished.reason == finish
    assert c.load().blocks.free == 64


def test_max_tokens_1_ends_with_one_token() -> None:
    c, model = core(), Model()
    c.apply(request("a", 3, max_new_tokens=1), 0.0)
    events = run(c, model)
    assert [type(e) for e in events] == [Began, Tokens, Finished]


def test_a_stop_token_ends_the_answer_and_is_reported() -> None:
    submit = request("a", 3, max_new_tokens=9)
    third = expected(submit)[2]
    c, model = core(), Model()
    stopping = request("a", 3, max_new_tokens=9, stop=frozenset({third}))
    c.apply(stopping, 0.0)
    events = run(c, model)
    assert answers(events)["a"] == expected(submit)[:3]
    assert isinstance(events[-1], Finished) and events[-1].reason == "stop"


def test_prompt_chunks_run_beside_decoding_under_the_token_budget() -> None:
    c, model = core(chunk_tokens=4), Model()
    c.apply(request("a", 2, max_new_tokens=9), 0.0)
    model.step(c)
    c.apply(request("b", 9), 0.0)
    assert model.step(c) == [("a", 2, 1), ("b", 0, 4)]
    assert model.step(c) == [("a", 3, 1), ("b", 4, 4)]
    assert model.step(c) == [("a", 4, 1), ("b", 8, 1)]
    assert model.step(c) == [("a", 5, 1), ("b", 9, 1)]


def test_who_decodes_goes_on_however_many_prompts_are_before_it() -> None:
    """The token budget is one prompt's in each step: all other places would be nobody's."""
    c, model = core(blocks=200, chunk_tokens=4, max_batch=2, policy=policy_named("priority")), Model()
    c.apply(request("late", 2, max_new_tokens=30), 0.0)
    model.step(c)
    for number in range(12):
        c.apply(request(str(number), ids=[number + 1] * 40, priority=1), 0.0)
    assert [model.step(c)[0] for _ in range(3)] == [("late", 2, 1), ("late", 3, 1), ("late", 4, 1)]


def test_out_of_blocks_the_youngest_gives_way_and_every_answer_stays_the_same() -> None:
    c, model = core(blocks=9, chunk_tokens=64), Model()
    submits = [request(key, 4, max_new_tokens=30) for key in ("a", "b", "c")]
    for submit in submits:
        c.apply(submit, 0.0)
    events = run(c, model, steps=500)
    assert answers(events) == {s.key: expected(s) for s in submits}
    assert next(e.key for e in events if isinstance(e, Finished)) == "a"
    assert c.load().blocks.free == 9


def test_a_handed_over_request_that_gives_way_is_computed_again_here() -> None:
    c, model = core(blocks=40, chunk_tokens=64), Model()
    old, young = request("old", 4, max_new_tokens=90), request("young", 8, max_new_tokens=88, local=False)
    c.apply(old, 0.0)
    c.apply(young, 0.0)
    model.step(c)
    reserved = next(e for e in c.take_events() if isinstance(e, Reserved))
    first = model.receive(c, reserved, young.token_ids)
    c.apply(Received(key="young", first_token_id=first, finish=None), 0.0)
    events: list[Event] = [Tokens(key="old", offset=0, token_ids=(expected(old)[0],)), *run(c, model, steps=500)]
    assert answers(events) == {"old": expected(old), "young": expected(young)}
    assert next(e.turns.recomputed for e in events if isinstance(e, Finished) and e.key == "young") > 0
    assert [e.key for e in events if isinstance(e, Began)] == ["young"], "a request begins once"


def test_a_request_larger_than_the_pool_is_refused_and_the_others_live_on() -> None:
    """K9."""
    c, model = core(blocks=2), Model()
    c.apply(request("big", 5, max_new_tokens=4), 0.0)
    c.apply(request("a", 4, max_new_tokens=4), 0.0)
    events = run(c, model)
    (refused,) = [e for e in events if isinstance(e, Failed)]
    assert refused.key == "big" and isinstance(refused.error, NotAdmitted) and "9 tokens" in str(refused.error)
    assert list(answers(events)) == ["a"]


def test_cancel_while_receiving_keeps_the_blocks_until_drained() -> None:
    """K1 (sending), K2."""
    c, model = core(), Model()
    c.apply(request("a", 9, local=False), 0.0)
    model.step(c)
    c.apply(Cancel("a"), 0.0)
    assert c.load().blocks.free < 64
    c.apply(Drained("a"), 0.0)
    assert c.load().blocks.free == 64
    c.check()


def test_a_hand_off_that_arrives_after_the_cancel_frees_everything() -> None:
    """K1 (received)."""
    c, model = core(), Model()
    c.apply(request("a", 9, local=False), 0.0)
    model.step(c)
    c.take_events()
    c.apply(Cancel("a"), 0.0)
    c.apply(Received(key="a", first_token_id=3, finish=None), 0.0)
    c.apply(Drained("a"), 0.0)
    assert c.load().blocks.free == 64
    assert c.take_events() == []


@pytest.mark.parametrize("end", [Cancel("a"), TransferFailed("a", HandOffLost("gone"))], ids=["abort", "loss"])
def test_in_a_full_pool_the_next_one_gets_no_block_that_late_bytes_may_still_hit(end: Cancel | TransferFailed) -> None:
    """K2: A ends in mid-transfer, and the only blocks there are for B are A's."""
    c, model = core(blocks=4), Model()
    reserved = handed_over(c, request("a", 9, local=False))
    assert len(reserved.blocks) == 3 and c.load().blocks.free == 0
    submit = request("b", ids=range(50, 59), local=False)
    c.apply(submit, 0.0)
    c.apply(end, 0.0)
    for _ in range(3):
        assert model.step(c) == []
    assert not [event for event in c.take_events() if isinstance(event, Reserved)], "A's writer has not let go"
    for block in reserved.blocks:  # the late bytes
        model.slots |= {(block, offset): -1 for offset in range(BLOCK)}
    c.apply(Drained("a"), 0.0)
    model.step(c)
    (again,) = c.take_events()
    assert isinstance(again, Reserved) and again.key == "b" and again.skip_tokens == 0
    first = model.receive(c, again, submit.token_ids)
    c.apply(Received(key="b", first_token_id=first, finish=None), 1.0)
    assert answers(run(c, model)) == {"b": expected(submit)}
    assert c.load().blocks.free == 4


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_answers_that_follow_a_hand_off_share_its_full_blocks_and_compute_the_rest(tokens: int) -> None:
    """F6: one of four is handed over, three are local; they hold the prompt's full blocks once."""
    c, model = core(chunk_tokens=100), Model()
    submits = [request(f"r-{i}", tokens, local=i > 0, max_new_tokens=6) for i in range(4)]
    reserved = handed_over(c, submits[0])
    first = model.receive(c, reserved, submits[0].token_ids)
    c.apply(Received(key="r-0", first_token_id=first, finish=None), 1.0)
    for follower in submits[1:]:
        c.apply(follower, 1.0)
    shared = (tokens - 1) // BLOCK
    computed = {key: (start, count) for key, start, count in model.step(c)}
    assert [computed[f"r-{i}"] for i in (1, 2, 3)] == [(shared * BLOCK, tokens - shared * BLOCK)] * 3
    held = c.load().blocks.held
    assert held == len({block for owner in c.memory.pool.owners() for block in c.memory.pool.blocks(owner)})
    assert held == sum(len(c.memory.pool.blocks(owner)) for owner in c.memory.pool.owners()) - 3 * shared
    streams = answers([*c.take_events(), *run(c, model)])
    assert streams == {submit.key: expected(submit) for submit in submits}
    assert c.load().blocks.free == 64


def test_a_lost_hand_off_fails_the_request_and_frees_after_the_drain() -> None:
    c, model = core(), Model()
    c.apply(request("a", 9, local=False), 0.0)
    model.step(c)
    c.take_events()
    c.apply(TransferFailed("a", HandOffLost("gone")), 0.0)
    (failed,) = c.take_events()
    assert isinstance(failed, Failed) and isinstance(failed.error, HandOffLost)
    assert c.load().blocks.free < 64
    c.apply(Drained("a"), 0.0)
    assert c.load().blocks.free == 64


def test_a_hand_off_given_up_while_waiting_for_blocks_fails_at_once() -> None:
    c, model = core(blocks=4), Model()
    c.apply(request("a", 4, max_new_tokens=9), 0.0)
    c.apply(request("b", 9, local=False), 0.0)
    model.step(c)
    c.take_events()
    c.apply(TransferFailed("b", HandOffLost("no room in time")), 0.0)
    assert [type(e) for e in c.take_events()] == [Failed]
    c.apply(Drained("b"), 0.0)
    assert c.load().waiting == 0


def test_cancel_frees_within_a_step_in_every_other_stage() -> None:
    """K1 (queued, prefilling, decoding)."""
    c, model = core(blocks=4, chunk_tokens=2), Model()
    c.apply(request("running", 2, max_new_tokens=9), 0.0)
    model.step(c)
    c.apply(request("computing", 4, max_new_tokens=1), 0.0)
    model.step(c)
    c.apply(request("waiting", 9), 0.0)
    model.step(c)
    for key in ("waiting", "computing", "running", "unknown"):
        c.apply(Cancel(key), 0.0)
    assert c.load().blocks.free == 4
    assert model.step(c) == []


def logged(key: str, tokens: int, **fields: object) -> Submit:
    """A request that wants all log-probabilities."""
    sampling = SamplingSpec(logprobs=1, prompt_logprobs=1, presence_penalty=1.0)
    return replace(request(key, tokens, **fields), sampling=sampling)  # type: ignore[arg-type]


def results_of(work: Sequence[Work]) -> list[Computed]:
    """What an executor gives: the log-probability of the token at position p is -p; the sampled one is 7."""
    results = []
    for item in work:
        last = min(item.slice.end + 1, item.history.prompt_tokens) if item.history else 0
        following = range(item.slice.start + 1, last) if item.slice.wants_all_logits else ()
        results.append(
            Computed(
                token_id=7 if item.slice.wants_logits else None,
                logprobs=TokenLogprobs(-float(item.slice.end)) if item.slice.wants_logits else None,
                prompt_logprobs=tuple(TokenLogprobs(-float(position)) for position in following),
            )
        )
    return results


def steps(c: DecodeCore, count: int) -> list[Event]:
    for _ in range(count):
        work = c.plan(0.0)
        c.complete(work, results_of(work), 0.0)
        c.check()
    return c.take_events()


@pytest.mark.parametrize("tokens", [1, 2, 6, 7, 13])
def test_logprobs_come_with_their_tokens_and_those_of_a_local_prompt_before_the_first(tokens: int) -> None:
    c = core()
    c.apply(logged("a", tokens, max_new_tokens=3), 0.0)
    events = steps(c, 8)
    (began,) = [e for e in events if isinstance(e, Began)]
    assert [logprobs.logprob for logprobs in began.prompt_logprobs] == [-float(p) for p in range(1, tokens)]
    found = [logprobs for e in events if isinstance(e, Tokens) for logprobs in e.logprobs]
    assert found == [TokenLogprobs(-float(tokens + i)) for i in range(3)]


def test_a_prompt_that_gave_way_half_computed_reports_each_of_its_tokens_once() -> None:
    c = core(blocks=26, chunk_tokens=1)
    c.apply(request("old", 4, max_new_tokens=100), 0.0)
    steps(c, 4 + GROWTH_TOKENS - 14)
    c.apply(logged("young", 35, max_new_tokens=1), 0.0)
    steps(c, 10)
    assert c.load().running == 2
    steps(c, 10)
    assert (c.load().running, c.load().waiting) == (1, 1), "old has outgrown its room"
    events = steps(c, 100)
    assert next(e.turns.recomputed for e in events if isinstance(e, Finished) and e.key == "young") == 1
    (began,) = [e for e in events if isinstance(e, Began)]
    assert [logprobs.logprob for logprobs in began.prompt_logprobs] == [-float(p) for p in range(1, 35)]


def test_a_handed_over_request_leaves_its_prompt_and_first_token_to_prefill() -> None:
    c = core()
    submit = logged("a", 5, max_new_tokens=3, local=False)
    assert not submit.wants_prompt_logprobs
    c.apply(submit, 0.0)
    steps(c, 1)
    c.apply(Received(key="a", first_token_id=3, finish=None), 0.0)
    events = steps(c, 3)
    assert next(e for e in events if isinstance(e, Began)).prompt_logprobs == ()
    found = [e.logprobs for e in events if isinstance(e, Tokens)]
    assert found == [(None,), (TokenLogprobs(-6.0),), (TokenLogprobs(-7.0),)]


def test_penalties_see_the_prompt_and_the_answer_apart_also_when_the_answer_began_elsewhere() -> None:
    c = core()
    c.apply(replace(logged("a", 5), prompt_tokens=3), 0.0)
    steps(c, 1)
    (item,) = c.plan(0.0)
    assert item.history == History(token_ids=(1, 2, 3, 4, 5, 7), prompt_tokens=3)
    assert list(item.history.answer) == [4, 5, 7]


def test_a_failed_step_ends_its_requests() -> None:
    c = core()
    c.apply(request("a", 2), 0.0)
    c.fail(c.plan(0.0), RuntimeError("broken"))
    (failed,) = c.take_events()
    assert isinstance(failed, Failed) and "broken" in str(failed.error)
    assert c.load().blocks.free == 64


def local(c: DecodeCore, model: Model, submit: Submit) -> list[Event]:
    """One request alone, from its submission to its end."""
    c.apply(submit, 0.0)
    return run(c, model)


def handed_over(c: DecodeCore, submit: Submit) -> Reserved:
    """Submits a request, and returns what is to be pulled for it."""
    c.apply(submit, 0.0)
    c.plan(0.0)
    (reserved,) = [event for event in c.take_events() if isinstance(event, Reserved)]
    return reserved


def test_a_prompt_asked_again_is_computed_from_its_first_unknown_block_on() -> None:
    c, model = core(chunk_tokens=100), Model()
    first, again = request("a", 9), request("b", 9)
    local(c, model, first)
    assert c.load().blocks.free == 64 and c.load().blocks.cached == 3  # 9 and 3 tokens with KV: the fourth has none
    c.apply(again, 0.0)
    assert model.step(c) == [("b", 8, 1)]
    events = [*c.take_events(), *run(c, model)]
    assert answers(events) == {"b": expected(again)}
    assert [e.cached_tokens for e in events if isinstance(e, Began)] == [8]


def test_after_a_failed_step_nothing_of_before_is_shared() -> None:
    """KV that held a NaN stayed in the prefix cache, and failed every later request with the same beginning."""
    c, model = core(chunk_tokens=4), Model()
    c.apply(request("bad", 9), 0.0)
    model.step(c)  # its first block is known by now
    c.fail(c.plan(0.0), RuntimeError("not a number"))
    c.take_events()
    c.apply(request("good", 9), 0.0)
    assert model.step(c) == [("good", 0, 4)]


def test_a_conversation_goes_on_from_the_blocks_of_its_last_turn() -> None:
    c, model = core(chunk_tokens=100), Model()
    first = request("a", 9, max_new_tokens=8)
    answer = answers(local(c, model, first))["a"]
    second = request("b", ids=(*first.token_ids, *answer, 7, 8), max_new_tokens=5)
    c.apply(second, 0.0)
    assert model.step(c) == [("b", 16, 3)], "9 + 7 tokens had their KV"
    assert answers([*c.take_events(), *run(c, model)]) == {"b": expected(second)}


def test_a_hand_off_skips_what_is_known_here_and_shares_its_blocks() -> None:
    """F7."""
    c, model = core(), Model()
    local(c, model, request("a", 9))
    again = request("b", 14, local=False)
    reserved = handed_over(c, again)
    assert (reserved.skip_tokens, len(reserved.blocks)) == (8, 4)
    first = model.receive(c, reserved, again.token_ids)
    c.apply(Received(key="b", first_token_id=first, finish=None), 1.0)
    events = run(c, model)
    assert answers(events) == {"b": expected(again)}
    assert [e.cached_tokens for e in events if isinstance(e, Began)] == [8]


@pytest.mark.parametrize(
    ("tokens", "skipped"), [(1, 0), (BLOCK - 1, 0), (BLOCK, 0), (BLOCK + 1, BLOCK), (3 * BLOCK, 2 * BLOCK)]
)
def test_what_came_by_a_hand_off_is_known_afterwards(tokens: int, skipped: int) -> None:
    c, model = core(), Model()
    reserved = handed_over(c, request("a", tokens, local=False))
    assert reserved.skip_tokens == 0
    first = model.receive(c, reserved, tuple(range(1, tokens + 1)))
    c.apply(Received(key="a", first_token_id=first, finish=None), 1.0)
    assert handed_over(c, request("b", tokens, local=False)).skip_tokens == skipped


def test_requests_that_wait_for_their_kv_share_nothing_of_it() -> None:
    c = core()
    one, two = (handed_over(c, request(key, 9, local=False)) for key in "ab")
    assert one.skip_tokens == two.skip_tokens == 0
    assert not set(one.blocks) & set(two.blocks)


def test_a_hand_off_that_failed_or_ended_early_leaves_nothing_behind() -> None:
    """When the first token ends a request, the sender leaves the pieces out that are not on their way."""
    c, model = core(), Model()
    for end in (TransferFailed("a", HandOffLost("gone")), Received(key="a", first_token_id=3, finish="stop")):
        reserved = handed_over(c, request("a", 9, local=False))
        assert reserved.skip_tokens == 0
        model.receive(c, reserved, tuple(range(9)), damaged=True)
        c.apply(end, 0.0)
        c.apply(Drained("a"), 0.0)
        assert (c.load().blocks.free, c.load().blocks.cached) == (64, 0)


def test_shared_blocks_stay_with_a_draining_request_until_it_is_drained() -> None:
    c, model = core(blocks=8, chunk_tokens=100), Model()
    local(c, model, request("a", 9, max_new_tokens=1))
    handed_over(c, request("b", 14, local=False, max_new_tokens=1))
    c.apply(Cancel("b"), 0.0)
    assert c.load().blocks.free == 4
    local(c, model, request("c", ids=range(50, 65), max_new_tokens=1))
    c.apply(Drained("b"), 0.0)
    assert handed_over(c, request("d", 14, local=False)).skip_tokens == 8


def test_requests_share_a_prefix_while_they_run_and_one_of_them_is_cancelled() -> None:
    c, model = core(chunk_tokens=4), Model()
    submits = [request(key, ids=(*range(1, 13), last), max_new_tokens=9) for key, last in (("a", 21), ("b", 22))]
    c.apply(submits[0], 0.0)
    for _ in range(3):
        model.step(c)
    c.apply(submits[1], 0.0)
    model.step(c)
    assert c.memory.pool.blocks("a")[:3] == c.memory.pool.blocks("b")[:3]
    c.apply(Cancel("a"), 0.0)
    events = run(c, model)
    assert answers(events)["b"] == expected(submits[1])
    assert c.load().blocks.free == 64


def test_a_request_that_gave_way_takes_up_what_is_left_of_its_blocks() -> None:
    submits = [request("a", 4, max_new_tokens=90), request("b", ids=range(50, 54), max_new_tokens=90)]
    computed = []
    for prefix_cache in (True, False):
        c, model = core(blocks=40, chunk_tokens=64, prefix_cache=prefix_cache), Model()
        for submit in submits:
            c.apply(submit, 0.0)
        tokens, events = 0, []
        while work := model.step(c):
            tokens += sum(count for _, _, count in work)
            events += c.take_events()
        assert answers(events) == {submit.key: expected(submit) for submit in submits}
        assert next(e.turns.recomputed for e in events if isinstance(e, Finished) and e.key == "b") > 0
        computed.append(tokens)
    assert computed[0] < computed[1]


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    c, model = core(chunk_tokens=100, prefix_cache=False), Model()
    local(c, model, request("a", 9))
    c.apply(request("b", 9), 0.0)
    assert model.step(c) == [("b", 0, 9)]
    assert c.load().blocks.cached == 0


class DecodeMachine(CoreMachine):
    """First come, first served in a tight pool; conversations go on from what they were answered."""

    TOTAL = 14

    def __init__(self) -> None:
        super().__init__()
        self.core = core(blocks=self.TOTAL, chunk_tokens=5, max_batch=3)

    @rule(alike=st.integers(0, 20), tokens=st.integers(1, 20), new=st.integers(1, 20), local=st.booleans())
    def submit(self, alike: int, tokens: int, new: int, local: bool) -> None:
        self.ask(self.unlike(alike, tokens), new, local=local)

    @precondition(lambda self: any(len(stream) > 1 for stream in answers(self.events).values()))
    @rule(data=st.data(), tokens=st.integers(1, 5), new=st.integers(1, 9), local=st.booleans())
    def next_turn(self, data: st.DataObject, tokens: int, new: int, local: bool) -> None:
        """Goes on from a request and what is known of its answer."""
        streams = answers(self.events)
        key = data.draw(st.sampled_from(sorted(streams)))
        self.ask((*self.submits[key].token_ids, *streams[key])[:30] + tuple(range(tokens)), new, local=local)

    @rule()
    def step(self) -> None:
        self.model.step(self.core)
        self.collect()

    def teardown(self) -> None:
        for _ in range(2000):
            self.lose_transfers()
            worked = self.model.step(self.core)
            self.collect()
            if not (worked or self.reserved):
                break
        self.all_over(self.TOTAL)


DecodeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDecodeMachine = DecodeMachine.TestCase
