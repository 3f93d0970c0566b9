"""The prefill core: admission in order, chunks under a budget, blocks kept until the transfer lets go of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.blocks import BlockPool
from services.engine.prefix import PrefixCache
from services.engine.sampling_spec import History, SamplingSpec, TokenLogprobs
from services.errors import Cancelled, HandOffLost, NotAdmitted
from services.prefill.core import PrefillCore
from services.prefill.messages import Admitted, Cancel, Event, Failed, FirstToken, Progress, Released, Submit
from services.schedule.fcfs import fcfs
from services.schedule.mlfq import Mlfq
from services.schedule.policy import Policy
from services.schedule.priority import priority
from services.schedule.weights import parse_weights
from services.worker.work import Computed

BLOCK = 4


def core(
    blocks: int = 8,
    chunk_tokens: int = 6,
    max_batch: int = 4,
    *,
    prefix_cache: bool = True,
    policy: Policy | None = None,
    weights: str = "",
) -> PrefillCore:
    pool = BlockPool(blocks)
    return PrefillCore(
        policy=policy or fcfs(),
        pool=pool,
        prefix=PrefixCache(pool, block_tokens=BLOCK, fingerprint="f", enabled=prefix_cache),
        block_tokens=BLOCK,
        chunk_tokens=chunk_tokens,
        max_batch=max_batch,
        weights=parse_weights(weights),
    )


def prompt(
    key: str, tokens: int, *, max_new_tokens: int = 5, stop: frozenset[int] = frozenset(), ids: Sequence[int] = ()
) -> Submit:
    ids = tuple(ids) or tuple(range(1, tokens + 1))
    return Submit(key=key, token_ids=ids, sampling=SamplingSpec(), max_new_tokens=max_new_tokens, stop_token_ids=stop)


def step(c: PrefillCore, token: int = 7, now_s: float = 1.0) -> tuple[list[tuple[str, int, int]], list[Event]]:
    """One step; returns (key, start, tokens) per slice, and the events."""
    work = c.plan(now_s)
    c.complete(work, [Computed(token_id=token if item.slice.wants_logits else None) for item in work], now_s)
    c.check()
    return [(item.key, item.slice.start, len(item.slice.token_ids)) for item in work], c.take_events()


def test_a_prompt_is_computed_in_chunks_and_reports_each_as_progress() -> None:
    c = core(chunk_tokens=6)
    c.apply(prompt("a", 14), 0.0)
    seen = [step(c, now_s=float(n)) for n in range(1, 4)]
    assert [slices for slices, _ in seen] == [[("a", 0, 6)], [("a", 6, 6)], [("a", 12, 2)]]
    assert seen[0][1] == [Admitted(key="a", blocks=(0, 1, 2, 3)), Progress(key="a", computed_tokens=6)]
    assert seen[2][1] == [
        Progress(key="a", computed_tokens=14),
        FirstToken(
            key="a", token_id=7, finish=None, submitted_s=0.0, admitted_s=1.0, computed_s=3.0, cached_tokens=0, chunks=3
        ),
    ]
    assert not c.plan(4.0)


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_prompt_takes_the_blocks_its_tokens_need_and_leases_them_when_computed(tokens: int) -> None:
    c = core()
    c.apply(prompt("a", tokens), 0.0)
    step(c)
    needed = -(-tokens // BLOCK)
    assert (c.load().blocks.leased, c.load().blocks.held, c.load().blocks.free) == (needed, 0, 8 - needed)
    c.apply(Released("a"), 2.0)
    assert c.load().blocks.free == 8


def test_prompts_share_a_step_in_order_of_arrival() -> None:
    c = core(chunk_tokens=10)
    c.apply(prompt("a", 4), 0.0)
    c.apply(prompt("b", 9), 0.0)
    slices, _ = step(c)
    assert slices == [("a", 0, 4), ("b", 0, 6)]


def test_max_batch_bounds_the_requests_of_a_step() -> None:
    c = core(chunk_tokens=100, max_batch=2)
    for key in "abc":
        c.apply(prompt(key, 1), 0.0)
    assert [key for key, _, _ in step(c)[0]] == ["a", "b"]
    assert [key for key, _, _ in step(c)[0]] == ["c"]


def test_unpulled_kv_holds_admission_back_and_nobody_passes() -> None:
    c = core(blocks=4, chunk_tokens=100)
    c.apply(prompt("a", 12), 0.0)  # 3 blocks
    c.apply(prompt("b", 0, ids=range(20, 28)), 0.0)  # 2 blocks: does not fit beside a
    c.apply(prompt("c", 0, ids=range(30, 34)), 0.0)  # 1 block: would fit, but b was first
    assert [key for key, _, _ in step(c)[0]] == ["a"]
    assert step(c)[0] == []
    c.apply(Released("a"), 1.0)
    assert [key for key, _, _ in step(c)[0]] == ["b", "c"]


def test_a_prompt_larger_than_the_pool_is_refused_and_the_others_live_on() -> None:
    """K9."""
    c = core(blocks=2)
    c.apply(prompt("big", 9), 0.0)
    c.apply(prompt("a", 8), 0.0)
    slices, events = step(c, now_s=0.0)
    (refused,) = [e for e in events if isinstance(e, Failed)]
    assert isinstance(refused.error, NotAdmitted) and "9 tokens" in str(refused.error) and "8" in str(refused.error)
    assert not refused.holds_blocks
    assert slices == [("a", 0, 6)]


def test_the_first_token_is_judged_like_any_other() -> None:
    for submit, finish in [
        (prompt("stop", 2, stop=frozenset({7})), "stop"),
        (prompt("length", 2, max_new_tokens=1), "length"),
        (prompt("both", 2, max_new_tokens=1, stop=frozenset({7})), "stop"),
        (prompt("goes-on", 2), None),
    ]:
        c = core()
        c.apply(submit, 0.0)
        (first,) = [e for e in step(c, token=7)[1] if isinstance(e, FirstToken)]
        assert first.finish == finish, submit.key


def test_cancel_while_waiting_forgets_it_at_once() -> None:
    """K1 (queued)."""
    c = core(blocks=2)
    c.apply(prompt("a", 8), 0.0)
    c.apply(prompt("b", 8), 0.0)
    step(c)
    c.apply(Cancel("b"), 0.0)
    (failed,) = c.take_events()
    assert isinstance(failed, Failed) and isinstance(failed.error, Cancelled) and not failed.holds_blocks
    assert c.load().waiting == 0


def test_cancel_while_computing_keeps_the_blocks_until_the_transfer_lets_go() -> None:
    """K1 (prefilling)."""
    c = core(chunk_tokens=4)
    c.apply(prompt("a", 8), 0.0)
    step(c)
    c.apply(Cancel("a"), 0.0)
    (failed,) = c.take_events()
    assert isinstance(failed, Failed) and failed.holds_blocks
    assert not c.plan(1.0)
    assert c.load().blocks.free == 6
    c.apply(Released("a"), 0.0)
    assert c.load().blocks.free == 8
    assert c.take_events() == []


def test_a_cancel_after_the_first_token_leaves_the_hand_off_alone() -> None:
    """K1 (sending)."""
    c = core()
    c.apply(prompt("a", 4), 0.0)
    step(c)
    c.apply(Cancel("a"), 0.0)
    assert c.take_events() == []
    assert c.load().blocks.leased == 1


def test_a_hand_off_that_ends_while_computing_fails_the_prompt() -> None:
    c = core(chunk_tokens=4)
    c.apply(prompt("a", 8), 0.0)
    step(c)
    c.apply(Released("a"), 0.0)
    (failed,) = c.take_events()
    assert isinstance(failed, Failed) and isinstance(failed.error, HandOffLost) and not failed.holds_blocks
    assert c.load().blocks.free == 8


def test_a_failed_step_ends_its_prompts_and_no_other() -> None:
    c = core(chunk_tokens=4)
    c.apply(prompt("a", 4), 0.0)
    c.apply(prompt("b", 4), 0.0)
    work = c.plan(0.0)
    c.take_events()
    c.fail(work, RuntimeError("broken"))
    (failed,) = c.take_events()
    assert isinstance(failed, Failed) and failed.key == "a" and "broken" in str(failed.error) and failed.holds_blocks
    assert [key for key, _, _ in step(c)[0]] == ["b"]


def test_load_counts_the_tokens_still_to_compute() -> None:
    c = core(blocks=3, chunk_tokens=6)
    c.apply(prompt("a", 10), 0.0)
    c.apply(prompt("b", 4), 0.0)
    step(c)
    load = c.load()
    assert (load.queued_tokens, load.running, load.waiting) == (4 + 4, 1, 1)


def test_a_prompt_asked_again_is_computed_from_its_first_unknown_block_on() -> None:
    c = core(chunk_tokens=100)
    c.apply(prompt("a", 14), 0.0)
    step(c)
    c.apply(Released("a"), 1.0)
    assert (c.load().blocks.free, c.load().blocks.cached) == (8, 3)
    c.apply(prompt("b", 14), 1.0)
    slices, events = step(c)
    assert slices == [("b", 12, 2)]
    admitted, cached, computed, first = events
    assert isinstance(admitted, Admitted) and len(admitted.blocks) == 4
    assert cached == Progress(key="b", computed_tokens=12), "what is there can be pulled before a step has run"
    assert computed == Progress(key="b", computed_tokens=14)
    assert isinstance(first, FirstToken) and (first.cached_tokens, first.chunks) == (12, 1)


def test_after_a_failed_step_nothing_of_before_is_shared() -> None:
    """KV that held a NaN stayed in the prefix cache, and failed every later prompt with the same beginning."""
    c = core(chunk_tokens=4)
    c.apply(prompt("bad", 9), 0.0)
    step(c)  # its first block is known by now
    c.fail(c.plan(0.0), RuntimeError("not a number"))
    c.apply(Released("bad"), 1.0)
    c.apply(prompt("good", 9), 1.0)
    assert step(c)[0] == [("good", 0, 4)]


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_prompt_known_as_a_whole_computes_its_last_token_again(tokens: int) -> None:
    c = core(chunk_tokens=100)
    for key in "ab":
        c.apply(prompt(key, tokens), 0.0)
        slices, _ = step(c)
    start = (tokens - 1) // BLOCK * BLOCK
    assert slices == [("b", start, tokens - start)]


def test_prompts_in_flight_share_what_is_computed_and_nothing_else() -> None:
    c = core(blocks=16, chunk_tokens=6)
    c.apply(prompt("a", 14), 0.0)
    step(c)  # 6 of 14: one full block
    c.apply(prompt("b", 7), 0.0)
    c.apply(prompt("c", 7), 0.0)
    c.chunk_tokens = 100
    _, events = step(c)
    of = {event.key: event.blocks for event in events if isinstance(event, Admitted)}
    a = c.pool.blocks("a")
    assert [blocks[0] for blocks in of.values()] == [a[0], a[0]]
    owned = [a[1:], of["b"][1:], of["c"][1:]]
    assert len({block for blocks in owned for block in blocks}) == 3 + 1 + 1


def test_prompts_that_arrive_together_are_computed_each_for_itself_and_known_once() -> None:
    c = core(chunk_tokens=100)
    for key in "ab":
        c.apply(prompt(key, 8), 0.0)
    slices, _ = step(c)
    assert slices == [("a", 0, 8), ("b", 0, 8)]
    for key in "ab":
        c.apply(Released(key), 1.0)
    assert c.load().blocks.cached == 2


def test_a_prompt_that_is_cancelled_leaves_what_it_has_computed_and_no_more() -> None:
    c = core(chunk_tokens=6)
    c.apply(prompt("a", 14), 0.0)
    step(c)
    c.apply(Cancel("a"), 0.0)
    c.apply(Released("a"), 0.0)
    assert c.load().blocks.cached == 1
    c.apply(prompt("b", 14), 0.0)
    assert step(c)[0] == [("b", 4, 6)]


def test_a_step_that_failed_registers_nothing() -> None:
    c = core(chunk_tokens=100)
    c.apply(prompt("a", 14), 0.0)
    c.fail(c.plan(0.0), RuntimeError("broken"))
    c.apply(Released("a"), 0.0)
    assert (c.load().blocks.cached, c.load().blocks.free) == (0, 8)


def test_under_pressure_cached_blocks_make_room_the_least_recently_used_first() -> None:
    c = core(blocks=6, chunk_tokens=100)
    for key, first in (("a", 100), ("b", 200)):
        c.apply(prompt(key, 0, ids=range(first, first + 9)), 0.0)
        step(c)
        c.apply(Released(key), 0.0)
    c.apply(prompt("big", 0, ids=range(300, 312)), 0.0)
    step(c)
    c.apply(Released("big"), 0.0)
    c.apply(prompt("b2", 0, ids=range(200, 209)), 0.0)
    assert step(c)[0] == [("b2", 8, 1)]
    c.apply(Released("b2"), 0.0)
    c.apply(prompt("a2", 0, ids=range(100, 109)), 0.0)
    assert step(c)[0][0][1] < 8


def test_without_a_prefix_cache_every_prompt_is_computed_from_its_beginning() -> None:
    c = core(chunk_tokens=100, prefix_cache=False)
    for key in "ab":
        c.apply(prompt(key, 9), 0.0)
        assert step(c)[0] == [(key, 0, 9)]
        c.apply(Released(key), 0.0)
    assert c.load().blocks.cached == 0


class PrefillMachine(RuleBasedStateMachine):
    """Random commands in a tight pool: blocks add up, and what is announced as computed is in the blocks, unchanged.

    The engine is a dictionary of slots; a block that somebody gets for its own is spoiled first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.core = core(blocks=14, chunk_tokens=5, max_batch=3)
        self.slots: dict[tuple[int, int], int] = {}
        self.submits: dict[str, Submit] = {}
        self.blocks: dict[str, tuple[int, ...]] = {}
        self.announced: dict[str, int] = {}
        self.ended: set[str] = set()

    def collect(self) -> None:
        for event in self.core.take_events():
            match event:
                case Admitted():
                    self.blocks[event.key] = event.blocks
                case Progress():
                    assert event.computed_tokens > self.announced.get(event.key, 0)
                    self.announced[event.key] = event.computed_tokens
                case FirstToken():
                    assert self.announced[event.key] == len(self.submits[event.key].token_ids) > event.cached_tokens
                    self.ended.add(event.key)
                case Failed():
                    self.ended.add(event.key)

    @rule(family=st.integers(0, 1), alike=st.integers(0, 20), tokens=st.integers(1, 20))
    def submit(self, family: int, alike: int, tokens: int) -> None:
        ids = [100 * family + n if n < alike else 1000 + 100 * len(self.submits) + n for n in range(tokens)]
        submit = prompt(f"r{len(self.submits)}", 0, ids=ids)
        self.submits[submit.key] = submit
        self.core.apply(submit, 0.0)

    @rule(fails=st.integers(0, 9))
    def step(self, fails: int) -> None:
        work = self.core.plan(0.0)
        for item in work:
            s = item.slice
            for position, token in enumerate(s.token_ids, s.start):
                where = s.blocks[position // BLOCK], position % BLOCK
                self.slots[where] = -1 if fails == 0 else token
        if fails == 0:
            self.core.fail(work, RuntimeError("broken"))
        else:
            self.core.complete(work, [Computed(token_id=7 if item.slice.wants_logits else None) for item in work], 0.0)
        self.collect()

    @precondition(lambda self: self.submits)
    @rule(data=st.data(), released=st.booleans())
    def end(self, data: st.DataObject, released: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.submits)))
        if released and key not in self.blocks:
            return  # nothing to release yet
        self.core.apply(Released(key) if released else Cancel(key), 0.0)
        if released:
            self.blocks[key] = ()
        self.collect()

    @invariant()
    def accounting_is_exact_and_what_can_be_pulled_is_right(self) -> None:
        self.core.check()
        for key, blocks in self.blocks.items():
            if blocks:
                computed = range(self.announced.get(key, 0))
                held = [self.slots[blocks[n // BLOCK], n % BLOCK] for n in computed]
                assert held == list(self.submits[key].token_ids[: len(computed)])

    def teardown(self) -> None:
        for _ in range(2000):
            for key in [key for key, blocks in self.blocks.items() if blocks and key in self.ended]:
                self.core.apply(Released(key), 0.0)
                self.blocks[key] = ()
            self.step(fails=1)
            self.accounting_is_exact_and_what_can_be_pulled_is_right()
            if not any(self.blocks.values()):
                break
        assert self.core.load().blocks.free == 14
        assert set(self.submits) <= self.ended


PrefillMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPrefillMachine = PrefillMachine.TestCase


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
def test_prompt_logprobs_are_gathered_over_the_chunks_and_come_with_the_first_token(chunk_tokens: int) -> None:
    c = core(chunk_tokens=chunk_tokens)
    spec = SamplingSpec(prompt_logprobs=0, logprobs=0)
    submit = Submit(
        key="a",
        token_ids=(1, 2, 3, 4, 5, 6, 7, 8, 9),
        sampling=spec,
        max_new_tokens=5,
        stop_token_ids=frozenset(),
        prompt_tokens=7,  # 8 and 9 were generated before, in a placement that was lost
    )
    assert submit.wants_prompt_logprobs and not prompt("b", 1).wants_prompt_logprobs
    c.apply(submit, 0.0)
    own = TokenLogprobs(-0.5)
    while work := c.plan(1.0):
        (item,) = work
        assert item.slice.wants_all_logits == (item.slice.start < 6)
        following = range(item.slice.start + 1, min(item.slice.end + 1, 7)) if item.slice.wants_all_logits else ()
        c.complete(
            work,
            [
                Computed(
                    token_id=7 if item.slice.wants_logits else None,
                    logprobs=own if item.slice.wants_logits else None,
                    prompt_logprobs=tuple(TokenLogprobs(-float(position)) for position in following),
                )
            ],
            1.0,
        )
    (first,) = [e for e in c.take_events() if isinstance(e, FirstToken)]
    assert first.logprobs == own
    assert [logprobs.logprob for logprobs in first.prompt_logprobs] == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]


@pytest.mark.parametrize(("given", "meant"), [(0, 3), (2, 2)])
def test_penalties_see_the_whole_sequence_and_which_of_it_is_the_prompt(given: int, meant: int) -> None:
    c = core(chunk_tokens=2)
    submit = Submit(
        key="a",
        token_ids=(1, 2, 3),
        sampling=SamplingSpec(presence_penalty=1.0),
        max_new_tokens=5,
        stop_token_ids=frozenset(),
        prompt_tokens=given,
    )
    c.apply(submit, 0.0)
    (item,) = c.plan(0.0)
    assert item.history is None, "nothing is sampled in the first chunk"
    c.complete([item], [Computed()], 0.0)
    (item,) = c.plan(0.0)
    assert item.history == History(token_ids=(1, 2, 3), prompt_tokens=meant)


def test_a_prompt_whose_logprobs_are_wanted_is_computed_whole_although_it_is_known() -> None:
    c = core(chunk_tokens=100)
    for key, wanted in (("a", None), ("b", 0)):
        spec = SamplingSpec(prompt_logprobs=wanted)
        ids = tuple(range(9))
        c.apply(Submit(key=key, token_ids=ids, sampling=spec, max_new_tokens=1, stop_token_ids=frozenset()), 0.0)
        assert [(item.slice.start, len(item.slice.token_ids)) for item in c.plan(0.0)] == [(0, 9)]
        c.complete(c.plan(0.0), [Computed(token_id=7)], 0.0)
        c.apply(Released(key), 0.0)


def test_short_prompts_pass_a_long_one_between_its_chunks_and_it_is_not_starved() -> None:
    """Feedback queues; first come, first served they wait for its end."""
    for policy, first in ((Mlfq(step_s=0.006, starvation_s=0.05), "short-0"), (fcfs(), "long")):
        c = core(blocks=64, chunk_tokens=6, policy=policy)
        c.apply(prompt("long", 0, ids=range(1000, 1060)), 0.0)
        slices, _ = step(c, now_s=0.0)
        assert slices == [("long", 0, 6)]
        ended: list[str] = []
        for turn in range(40):
            if turn < 20:
                c.apply(prompt(f"short-{turn}", 0, ids=range(100 * turn, 100 * turn + 6)), turn * 0.01)
            _, events = step(c, now_s=turn * 0.01)
            ended += [event.key for event in events if isinstance(event, FirstToken)]
            for key in ended:
                c.apply(Released(key), turn * 0.01)
        assert ended[0] == first
        assert "long" in ended and len(ended) == 21


def test_kv_that_a_long_prompt_holds_between_its_chunks_is_its_own_and_it_goes_on_when_nobody_else_can() -> None:
    c = core(blocks=4, chunk_tokens=6, policy=priority())
    c.apply(prompt("long", 0, ids=range(1000, 1013)), 0.0)  # all 4 blocks
    step(c)
    c.apply(replace(prompt("urgent", 4), priority=1), 0.0)
    assert [key for key, _, _ in step(c)[0]] == ["long"]
    assert [key for key, _, _ in step(c)[0]] == ["long"]
    assert step(c)[0] == []
    c.apply(Released("long"), 1.0)
    assert [key for key, _, _ in step(c)[0]] == ["urgent"]


@pytest.mark.parametrize(("weights", "gold"), [("", 9), ("gold=2", 12)])
def test_prompts_of_a_tenant_of_twice_the_weight_come_twice_as_often(weights: str, gold: int) -> None:
    c = core(blocks=200, policy=Mlfq(step_s=0.006), weights=weights)
    for number in range(18):
        for tenant in ("gold", "other"):
            ids = [1000 * len(tenant) + 10 * number + i for i in range(6)]
            c.apply(replace(prompt(f"{tenant}-{number}", 0, ids=ids), tenant=tenant), 0.0)
    first = [key for _ in range(18) for key, _, _ in step(c, now_s=0.0)[0]]
    assert len(first) == 18
    assert sum(key.startswith("gold") for key in first) == pytest.approx(gold, abs=1)


def test_load_names_the_schedule_and_counts_its_levels() -> None:
    c = core(policy=Mlfq(step_s=0.006))
    c.apply(prompt("long", 30), 0.0)
    c.apply(prompt("short", 5), 0.0)
    load = c.load()
    assert load.schedule == "mlfq" and sum(load.levels) == 2 and load.levels[0] <= 1
