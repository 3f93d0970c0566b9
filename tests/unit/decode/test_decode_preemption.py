"""The decode core gives requests turns: whoever gives way, and however, every answer is the undisturbed one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest
from decode_model import BLOCK, STEP_S, CoreMachine, Model, answers, core, expected, request, run
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from services.decode.core import DecodeCore
from services.decode.messages import (
    Cancel,
    Copy,
    Event,
    Failed,
    Finished,
    Reserved,
    Submit,
)
from services.errors import DiptychError
from services.schedule.catalog import policy_named
from services.schedule.fcfs import fcfs
from services.schedule.mlfq import Mlfq
from services.schedule.ordered import Ordered
from services.schedule.policy import Next, Policy
from services.schedule.swap import SwapMode
from services.schedule.weights import parse_weights

MODES = list(SwapMode)


class Shuffled(Ordered):
    """A policy whose choice has nothing to do with the one before."""

    def __init__(self, seed: int) -> None:
        super().__init__("shuffled", lambda job, now_s: 0.0)
        self.random = random.Random(seed)

    def choose(self, batch: int, now_s: float) -> Sequence[str]:
        keys = super().choose(1 << 20, now_s)
        return self.random.sample(keys, min(batch, len(keys)))

    def upcoming(self, limit: int, batch: int, now_s: float) -> Sequence[Next]:
        keys = self.choose(limit, now_s)
        return [Next(key=key, enst_s=float(place)) for place, key in enumerate(keys)]

    def enst_s(self, keys: Iterable[str], batch: int, now_s: float) -> Sequence[float]:
        return [self.random.random() for _ in keys]


def mlfq() -> Mlfq:
    return Mlfq(step_s=STEP_S, starvation_s=8 * STEP_S)


def distinct(key: str, tokens: int, **fields: object) -> Submit:
    """A request that shares nothing with those of other keys."""
    first = 1000 * (ord(key[0]) - ord("a") + 1)
    return request(key, ids=range(first, first + tokens), **fields)  # type: ignore[arg-type]


def turns_of(events: Sequence[Event], key: str) -> object:
    return next(event.turns for event in events if isinstance(event, Finished) and event.key == key)


def finished(events: Sequence[Event]) -> list[str]:
    return [event.key for event in events if isinstance(event, Finished)]


def submitted(c: DecodeCore, submits: Sequence[Submit]) -> None:
    for submit in submits:
        c.apply(submit, 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_short_answers_pass_a_long_one_under_feedback_queues_and_not_first_come_first_served(mode: SwapMode) -> None:
    submits = [distinct("a", 4, max_new_tokens=40), *(distinct(key, 4, max_new_tokens=3) for key in "bcd")]
    orders = []
    for policy in (mlfq(), fcfs()):
        c, model = core(max_batch=1, policy=policy, mode=mode, host_blocks=64), Model()
        submitted(c, submits)
        events = run(c, model, steps=400)
        assert answers(events) == {submit.key: expected(submit) for submit in submits}
        orders.append(finished(events))
    assert orders == [["b", "c", "d", "a"], ["a", "b", "c", "d"]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host_blocks", [0, 3, 64])
@pytest.mark.parametrize("name", ["fcfs", "mlfq", "mlfq-naive", "priority", "auto"])
def test_out_of_blocks_whoever_gives_way_every_answer_stays_the_same(
    name: str, mode: SwapMode, host_blocks: int
) -> None:
    """K6, K7: no token is lost or doubled, and nobody waits for KV that was consumed."""
    policy = policy_named(name, step_s=STEP_S, starvation_s=8 * STEP_S)
    c, model = core(blocks=12, chunk_tokens=64, policy=policy, mode=mode, host_blocks=host_blocks), Model()
    submits = [distinct(key, 4, max_new_tokens=30, priority=i % 2) for i, key in enumerate("abcd")]
    submitted(c, submits)
    events = run(c, model, steps=2000)
    assert answers(events) == {submit.key: expected(submit) for submit in submits}
    blocks = c.load().blocks
    assert (blocks.free, blocks.swapped, blocks.total) == (12, 0, 12)


def test_kv_that_gives_way_is_copied_and_not_computed_again() -> None:
    submits = [distinct(key, 4, max_new_tokens=30) for key in "abc"]
    computed = {}
    for mode in MODES:
        c, model = core(blocks=12, chunk_tokens=64, policy=mlfq(), mode=mode, host_blocks=64), Model()
        submitted(c, submits)
        events = run(c, model, steps=2000)
        turns = [event.turns for event in events if isinstance(event, Finished)]
        computed[mode] = sum(one.recomputed for one in turns), sum(one.swapped_bytes for one in turns)
    for mode in (SwapMode.PROACTIVE, SwapMode.REACTIVE):
        assert computed[mode][0] == 0 and computed[mode][1] > 0
    assert computed[SwapMode.RECOMPUTE][0] > 0 and computed[SwapMode.RECOMPUTE][1] == 0


def swapped_out(mode: SwapMode = SwapMode.PROACTIVE) -> tuple[DecodeCore, Model, Copy]:
    """A core with a request "a" whose KV is on its way to the host, because a long prompt "b" takes its blocks."""
    priority = policy_named("priority")
    c = core(blocks=8, chunk_tokens=64, max_batch=1, policy=priority, mode=mode, host_blocks=64)
    model = Model()
    c.apply(distinct("a", 4, max_new_tokens=20), 0.0)
    for step in range(6):
        model.step(c, step * STEP_S)
    c.apply(distinct("b", 24, max_new_tokens=4, priority=1), 0.0)
    c.take_events()
    model.step(c, 1.0)
    (copy,) = [event for event in c.take_events() if isinstance(event, Copy)]
    model.begin(copy)
    return c, model, copy


def test_blocks_that_are_copied_out_are_nobodys_before_the_copy_has_ended() -> None:
    c, model, copy = swapped_out()
    assert copy.out and copy.key == "a"
    assert set(copy.blocks) <= set(c.memory.pool.blocks("a"))
    for step in range(3):
        assert model.step(c, 1.0 + step * STEP_S) == [], "b does not fit beside them"
    model.end(c, copy, 2.0)
    load = c.load()
    assert (load.swapped, load.blocks.swapped, load.blocks.total) == (1, len(copy.blocks), 8 + len(copy.blocks))
    assert [key for key, _, _ in model.step(c, 2.0)] == ["b"]


@pytest.mark.parametrize("stage", ["leaving", "swapped", "returning"])
def test_cancel_frees_device_and_host_blocks_of_what_is_swapped_or_on_its_way(stage: str) -> None:
    """K1, swapped: and late bytes of the copy land in blocks that are still nobody else's."""
    c, model, copy = swapped_out()
    if stage != "leaving":
        model.end(c, copy, 2.0)
    if stage == "returning":
        c.apply(Cancel("b"), 2.0)
        assert model.step(c, 2.0) == []
        (copy,) = [event for event in c.take_events() if isinstance(event, Copy)]
        assert not copy.out
        model.begin(copy)
    c.apply(Cancel("a"), 3.0)
    c.check()
    others = [distinct(key, 4, max_new_tokens=20) for key in "cd"]
    submitted(c, others)
    events: list[Event] = []
    for step in range(4):
        model.step(c, 3.0 + step * STEP_S)
        events += c.take_events()
    if copy in model.copies:
        model.end(c, copy, 4.0)
    events += run(c, model, steps=400)
    for other in others:
        assert answers(events)[other.key] == expected(other)
    blocks = c.load().blocks
    assert (blocks.free, blocks.swapped, blocks.held) == (8, 0, 0)
    assert not c.memory.host.owners()


@pytest.mark.parametrize("out", [True, False])
def test_a_copy_that_fails_fails_its_request_and_frees_everything(out: bool) -> None:
    c, model, copy = swapped_out()
    if not out:
        model.end(c, copy, 2.0)
        c.apply(Cancel("b"), 2.0)
        model.step(c, 2.0)
        (copy,) = [event for event in c.take_events() if isinstance(event, Copy)]
        model.begin(copy)
    model.end(c, copy, 3.0, DiptychError("the device is gone"))
    (failed,) = [event for event in c.take_events() if isinstance(event, Failed)]
    assert failed.key == "a" and "gone" in str(failed.error)
    c.apply(Cancel("b"), 4.0)
    assert (c.load().blocks.free, c.memory.host.owners()) == (8, ())


def test_a_step_waits_for_reactive_copies_and_not_for_proactive_ones() -> None:
    for mode, waits in ((SwapMode.REACTIVE, True), (SwapMode.PROACTIVE, False)):
        c, model = core(blocks=12, chunk_tokens=64, policy=policy_named("priority"), mode=mode, host_blocks=64), Model()
        submitted(c, [distinct(key, 4, max_new_tokens=4) for key in "abd"])
        model.step(c, 0.0)
        c.apply(distinct("c", 24, max_new_tokens=4, priority=2), 0.0)
        c.take_events()
        seen = [model.step(c, 1.0), model.step(c, 1.1)]
        assert any(isinstance(event, Copy) for event in c.take_events())
        assert (seen[1] == []) == waits


def test_what_others_share_stays_theirs_when_one_of_them_leaves() -> None:
    reactive = SwapMode.REACTIVE
    c, model = core(blocks=14, chunk_tokens=64, max_batch=1, policy=mlfq(), mode=reactive, host_blocks=64), Model()
    lasts = (("a", 21), ("b", 22), ("c", 23))
    submits = [request(key, ids=(*range(1, 13), last), max_new_tokens=24) for key, last in lasts]
    submitted(c, submits)
    events = run(c, model, steps=2000)
    assert answers(events) == {submit.key: expected(submit) for submit in submits}
    assert sum(event.turns.swapped_bytes for event in events if isinstance(event, Finished)) > 0
    assert c.load().blocks.free == 14


def test_kv_that_was_doubted_is_not_shared_after_it_came_back() -> None:
    """A step that failed casts doubt on what everybody has; a way over the host must not launder it."""
    for doubted, start in ((True, 0), (False, 2 * BLOCK)):
        c, model, copy = swapped_out()
        if doubted:
            c.fail([], RuntimeError("not a number"))
        model.end(c, copy, 2.0)
        c.apply(Cancel("b"), 2.0)
        run(c, model)
        a = distinct("a", 4, max_new_tokens=20)
        c.apply(request("again", ids=(*a.token_ids, *expected(a)[:5]), max_new_tokens=2), 3.0)
        assert [slice_start for _, slice_start, _ in model.step(c, 3.0)] == [start]


def test_a_request_larger_than_the_pool_is_refused_however_much_the_host_holds() -> None:
    """K9."""
    c, model = core(blocks=2, policy=mlfq(), mode=SwapMode.PROACTIVE, host_blocks=100), Model()
    submitted(c, [request("big", 5, max_new_tokens=4), request("a", 4, max_new_tokens=4)])
    events = run(c, model)
    assert [event.key for event in events if isinstance(event, Failed)] == ["big"]
    assert finished(events) == ["a"]


@pytest.mark.parametrize("mode", MODES)
def test_resume_and_preempt_do_not_alternate_for_ever(mode: SwapMode) -> None:
    """K8. With more requests than starve within their patience, each lost what it had computed again before it got a
    token for it, and none ever ended.
    """
    c = core(blocks=14, chunk_tokens=5, max_batch=4, policy=mlfq(), mode=mode, host_blocks=100)
    submits = [distinct(chr(ord("a") + i), 18, max_new_tokens=12) for i in range(20)]
    submitted(c, submits)
    events = run(c, Model(), steps=4000)
    assert answers(events) == {submit.key: expected(submit) for submit in submits}


def test_whoever_is_preempted_is_told_how_often_and_how_long_it_waited() -> None:
    c, model = core(max_batch=1, policy=mlfq()), Model()
    submitted(c, [distinct("a", 4, max_new_tokens=10), distinct("b", 4, max_new_tokens=10)])
    events = run(c, model)
    turns = turns_of(events, "a")
    assert turns.preemptions >= 2 and turns.lowest_level >= 1  # type: ignore[attr-defined]
    assert turns.waited_s == pytest.approx(10 * STEP_S, abs=5 * STEP_S)  # type: ignore[attr-defined]
    whats = [change.what for change in turns.changes]  # type: ignore[attr-defined]
    assert "demoted" in whats
    gone_and_back = [what for what in whats if what in ("preempted", "resumed")]
    assert gone_and_back == ["preempted", "resumed"] * turns.preemptions  # type: ignore[attr-defined]
    alone, model = core(max_batch=1, policy=mlfq()), Model()
    alone.apply(distinct("a", 4, max_new_tokens=10), 0.0)
    turns = turns_of(run(alone, model), "a")
    assert (turns.preemptions, turns.swapped_bytes, turns.recomputed) == (0, 0, 0)  # type: ignore[attr-defined]
    assert turns.waited_s == pytest.approx(0.0, abs=1e-9)  # type: ignore[attr-defined]


def test_short_prompts_pass_a_long_one_between_its_chunks() -> None:
    """Skip-join, aggregated: a long prompt joins below, so that a short one that came later begins first."""
    c, model = core(blocks=200, chunk_tokens=8, policy=mlfq()), Model()
    submitted(c, [distinct("a", 400, max_new_tokens=2), distinct("b", 6, max_new_tokens=2)])
    assert model.step(c)[0][0] == "b"
    c, model = core(blocks=200, chunk_tokens=8, policy=fcfs()), Model()
    submitted(c, [distinct("a", 400, max_new_tokens=2), distinct("b", 6, max_new_tokens=2)])
    assert model.step(c)[0][0] == "a"


@pytest.mark.parametrize("chunk_tokens", [1, 2, BLOCK])
def test_a_prompt_stays_where_it_joined_until_its_first_token_however_small_its_chunks(chunk_tokens: int) -> None:
    """Before, a chunk of one token passed for a decode step, and each of them used up the quantum of the level."""
    policy = Mlfq(step_s=STEP_S)
    c, model = core(blocks=64, chunk_tokens=chunk_tokens, policy=policy), Model()
    submitted(c, [distinct("a", 33, max_new_tokens=4)])
    joined, chunks = policy.level("a"), -(-33 // chunk_tokens)
    levels = []
    for step in range(chunks):
        levels.append(policy.level("a"))
        assert model.step(c, step * STEP_S) == [("a", step * chunk_tokens, min(chunk_tokens, 33 - step * chunk_tokens))]
    assert joined > 1 and levels == [joined] * chunks
    assert policy.level("a") == 1


@pytest.mark.parametrize("weight", [1, 2])
@pytest.mark.parametrize("name", ["mlfq", "mlfq-naive"])
def test_a_tenant_of_twice_the_weight_gets_two_thirds_of_what_is_computed(name: str, weight: int) -> None:
    """Over hundreds of steps: the shares are those of served tokens, and quanta double."""
    weights = parse_weights(f"gold={weight}")
    policy = policy_named(name, step_s=STEP_S)
    c, model = core(blocks=1600, max_batch=4, policy=policy, weights=weights), Model()
    tenants = {key: ("gold", "other")[i % 2] for i, key in enumerate("abcdefghijkl")}
    submitted(c, [distinct(key, 4, max_new_tokens=400, tenant=tenant) for key, tenant in tenants.items()])
    served = {"gold": 0, "other": 0}
    for step in range(600):
        for key, _, tokens in model.step(c, step * STEP_S):
            served[tenants[key]] += tokens
    assert served["gold"] / sum(served.values()) == pytest.approx(weight / (weight + 1), abs=0.04)


def test_hand_offs_are_received_ahead_of_their_turn_where_there_is_room() -> None:
    c, model = core(max_batch=1), Model()
    submitted(c, [distinct("a", 4, max_new_tokens=9), *(distinct(key, 4, local=False) for key in "bc")])
    model.step(c)
    assert [event.key for event in c.take_events() if isinstance(event, Reserved)] == ["b", "c"]


POLICIES: dict[str, Callable[[int], Policy]] = {
    "shuffled": Shuffled,
    "fcfs": lambda seed: fcfs(),
    "mlfq": lambda seed: mlfq(),
    "naive": lambda seed: Mlfq(step_s=STEP_S, starvation_s=4 * STEP_S, skip_join=False),
    "priority": lambda seed: policy_named("priority"),
    "auto": lambda seed: policy_named("auto", step_s=STEP_S, starvation_s=4 * STEP_S),
}


class PreemptionMachine(CoreMachine):
    """Random commands, policies and swaps in a tight pool: blocks add up on device and host, nobody who could run waits
    for nothing, and every answer is the undisturbed one.
    """

    TOTAL = 14

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        mode=st.sampled_from(MODES),
        host_blocks=st.sampled_from([0, 6, 100]),
        batch=st.integers(1, 4),
        seed=st.integers(0, 99),
    )
    def begin(self, policy: str, mode: SwapMode, host_blocks: int, batch: int, seed: int) -> None:
        self.core = core(
            blocks=self.TOTAL,
            chunk_tokens=5,
            max_batch=batch,
            policy=POLICIES[policy](seed),
            mode=mode,
            host_blocks=host_blocks,
        )

    @rule(
        alike=st.integers(0, 20),
        tokens=st.integers(1, 20),
        new=st.integers(1, 20),
        local=st.booleans(),
        priority=st.integers(-1, 2),
    )
    def submit(self, alike: int, tokens: int, new: int, local: bool, priority: int) -> None:
        self.ask(self.unlike(alike, tokens), new, local=local, priority=priority)

    @rule(idle_s=st.sampled_from([0.0, STEP_S, 10 * STEP_S]))
    def step(self, idle_s: float) -> None:
        self.now_s += idle_s
        worked = self.model.step(self.core, self.now_s)
        self.now_s += STEP_S
        self.collect()
        if not worked:
            live = len(self.core.memory.requests)
            assert not live or self.model.copies or self.reserved, "somebody could have run"

    @precondition(lambda self: self.model.copies)
    @rule(data=st.data(), fails=st.integers(0, 19))
    def copy_ends(self, data: st.DataObject, fails: int) -> None:
        copy = data.draw(st.sampled_from(self.model.copies))
        error = DiptychError("lost") if fails == 0 else None
        if error:
            self.cancelled.add(copy.key)
        self.model.end(self.core, copy, self.now_s, error)
        self.collect()

    @invariant()
    def everybody_is_in_a_level_and_in_a_count(self) -> None:
        load, requests = self.core.load(), list(self.core.memory.requests)
        assert sum(load.levels) == len([one for one in requests if one.stage.value not in ("draining", "ending")])
        assert load.running + load.waiting == sum(load.levels)

    def teardown(self) -> None:
        for _ in range(3000):
            self.lose_transfers()
            for copy in list(self.model.copies):
                self.model.end(self.core, copy, self.now_s)
            if not len(self.core.memory.requests):
                break
            self.step(STEP_S)
            self.accounting_and_streams_are_exact()
            self.everybody_is_in_a_level_and_in_a_count()
        self.all_over(self.TOTAL)
        assert not self.core.memory.host.owners()


PreemptionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPreemptionMachine = PreemptionMachine.TestCase
