"""Feedback queues: hand-computed schedules, an O(n) reference, and the bound on waiting."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.schedule.ladder import LEVELS
from services.schedule.mlfq import Mlfq
from services.schedule.policy import Job, Policy


def job(key: str, **fields: object) -> Job:
    return Job(key=key, **{"first_step_s": 1.0, **fields})  # type: ignore[arg-type]


def step(policy: Policy, batch: int, now_s: float) -> list[str]:
    """One step of a second for those that are chosen."""
    keys = list(policy.choose(batch, now_s))
    policy.ran(keys, 1.0, now_s + 1.0)
    return keys


def schedule(policy: Policy, batch: int, steps: int) -> list[str]:
    return ["".join(step(policy, batch, float(at))) for at in range(steps)]


def test_one_step_then_two_then_four_first_in_first_out_inside_a_level() -> None:
    policy = Mlfq(step_s=1.0, starvation_s=math.inf)
    for key in "abc":
        policy.arrive(job(key), 0.0)
    assert schedule(policy, 1, 13) == list("abcaabbccaaaa")
    assert (policy.level("a"), policy.level("b"), list(policy.levels()[:4])) == (3, 2, [0, 0, 2, 1])


def test_who_arrives_later_preempts_between_steps() -> None:
    policy = Mlfq(step_s=1.0, starvation_s=math.inf)
    policy.arrive(job("a"), 0.0)
    assert schedule(policy, 1, 2) == ["a", "a"]
    policy.arrive(job("b"), 2.0)
    assert [step(policy, 1, at) for at in (2.0, 3.0, 4.0)] == [["b"], ["a"], ["b"]]


@pytest.mark.parametrize(
    ("first_step_s", "level"), [(0.0, 0), (1.0, 0), (1.5, 0), (1.6, 1), (2.5, 1), (2.6, 2), (9, 4)]
)
def test_skip_join_enters_where_the_first_step_fits_to_half_a_step(first_step_s: float, level: int) -> None:
    skipping, naive = Mlfq(step_s=1.0), Mlfq(step_s=1.0, skip_join=False)
    for policy in (skipping, naive):
        policy.arrive(job("a", first_step_s=first_step_s), 0.0)
    assert (skipping.level("a"), naive.level("a")) == (level, 0)


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_a_prompt_is_one_first_step_even_in_chunks_and_then_its_request_is_like_any_that_had_its_first_step(
    tokens: int,
) -> None:
    policy = Mlfq(step_s=1.0)
    policy.arrive(job("a", first_step_s=4.0), 0.0)
    for at in (3.0, 6.0):  # its quantum is 4 s
        policy.computed("a", 3.0, at, tokens=tokens)
        assert policy.level("a") == 2
    policy.computed("a", 3.0, 9.0, tokens=tokens, first=True)
    assert policy.level("a") == 1
    assert [(change.what, change.level) for change in policy.take_changes()] == [("began", 1)]
    policy.ran(["a"], 1.0, 10.0)
    assert policy.level("a") == 1
    policy.ran(["a"], 1.0, 11.0)
    assert policy.level("a") == 2


def test_without_the_skip_every_chunk_lowers() -> None:
    policy = Mlfq(step_s=1.0, skip_join=False)
    policy.arrive(job("a", first_step_s=4.0), 0.0)
    for level, first in ((1, False), (2, False), (3, True)):
        policy.computed("a", 3.0, 3.0 * level, tokens=100, first=first)
        assert policy.level("a") == level


def test_who_was_promoted_leaves_the_top_after_one_chunk() -> None:
    policy = Mlfq(step_s=1.0, starvation_s=5.0)
    policy.arrive(job("a", first_step_s=4.0), 0.0)
    policy.choose(1, 5.0)
    assert policy.level("a") == 0
    policy.computed("a", 3.0, 8.0, tokens=100)
    assert policy.level("a") == 1


def test_what_is_computed_again_is_charged_like_anything_else() -> None:
    policy = Mlfq(step_s=1.0)
    policy.arrive(job("a", first_step_s=2.0), 0.0)
    policy.computed("a", 2.0, 2.0, tokens=100, first=True)
    assert policy.level("a") == 1
    policy.computed("a", 2.0, 4.0, tokens=101)
    assert policy.level("a") == 2


def test_a_first_step_longer_than_all_quanta_enters_the_last_level_and_stays_there() -> None:
    policy = Mlfq(step_s=1.0, starvation_s=math.inf)
    policy.arrive(job("a", first_step_s=1e9), 0.0)
    policy.ran(["a"], 1e9, 1e9)
    assert policy.level("a") == LEVELS - 1


def test_a_short_prompt_passes_a_long_one_that_came_first_only_with_skip_join() -> None:
    orders = []
    for skip_join in (True, False):
        policy = Mlfq(step_s=1.0, skip_join=skip_join)
        policy.arrive(job("long", first_step_s=8.0), 0.0)
        policy.arrive(job("short"), 0.0)
        orders.append(policy.choose(1, 0.0))
    assert orders == [["short"], ["long"]]


def test_who_waits_for_the_starvation_limit_is_promoted_with_its_used_time_reset() -> None:
    policy = Mlfq(step_s=1.0, starvation_s=5.0)
    policy.arrive(job("a"), 0.0)
    assert schedule(policy, 1, 2) == ["a", "a"]  # in level 1, one of two steps used
    for at in range(2, 7):
        policy.arrive(job(f"new {at}"), float(at))
        assert step(policy, 1, float(at)) == [f"new {at}"]
    policy.arrive(job("newest"), 7.0)
    policy.choose(1, 7.0)
    assert policy.level("a") == 0
    assert step(policy, 1, 7.0) == ["newest"]  # it came before the promotion
    assert step(policy, 1, 8.0) == ["a"]
    assert policy.level("a") == 1
    assert [change.what for change in policy.take_changes() if change.key == "a"] == ["demoted", "promoted", "demoted"]


def test_a_higher_priority_is_promoted_sooner() -> None:
    policy = Mlfq(step_s=1.0, starvation_s=8.0)
    policy.arrive(job("usual", first_step_s=2.0), 0.0)
    policy.arrive(job("urgent", first_step_s=2.0, priority=1), 0.0)
    policy.choose(1, 3.9)
    assert policy.level("urgent") == 1
    policy.choose(1, 4.0)
    assert (policy.level("urgent"), policy.level("usual")) == (0, 1)


def test_a_higher_priority_goes_first_inside_a_level() -> None:
    policy = Mlfq(step_s=1.0)
    for key, priority in (("a", 0), ("b", 0), ("c", 1), ("d", -1), ("e", 0)):
        policy.arrive(job(key, priority=priority), 0.0)
    assert policy.choose(5, 0.0) == ["c", "a", "b", "e", "d"]


def test_a_deadline_promotes_when_what_is_left_would_no_longer_be_done_in_time() -> None:
    policy = Mlfq(step_s=1.0, starvation_s=math.inf)
    policy.arrive(job("a", first_step_s=4.0, deadline_s=20.0, most_tokens=5), 0.0)
    policy.choose(1, 14.9)
    assert policy.level("a") == 2
    policy.choose(1, 15.0)
    assert policy.level("a") == 0


def test_quanta_follow_the_measured_step_time() -> None:
    policy = Mlfq(step_s=1.0)
    for _ in range(200):
        policy.measured(3.0)
    policy.arrive(job("a", first_step_s=3.0), 0.0)
    assert policy.level("a") == 0
    assert policy.quantum_s == pytest.approx(3.0, rel=1e-4)


def test_several_steps_at_once_end_where_single_steps_do() -> None:
    single, jumping = Mlfq(step_s=1.0), Mlfq(step_s=1.0)
    for policy in (single, jumping):
        policy.arrive(job("a"), 0.0)
        policy.choose(2, 0.0)
    for at in range(21):
        single.ran(["a"], 1.0, at + 1.0)
    assert jumping.steady_steps(1.0, 0.0) > 21  # nobody waits
    jumping.ran(["a"], 21.0, 21.0, steps=21)
    assert single.level("a") == jumping.level("a") == 4
    for policy in (single, jumping):
        policy.ran(["a"], 9.0, 30.0, steps=9)
        assert policy.level("a") == 4
        policy.ran(["a"], 1.0, 31.0)
        assert policy.level("a") == 5


def test_a_choice_stands_for_as_long_as_it_says() -> None:
    policy = Mlfq(step_s=1.0, starvation_s=100.0)
    for key in "ab":
        policy.arrive(job(key, first_step_s=4.0), 0.0)
    assert policy.choose(1, 0.0) == ["a"]
    assert policy.steady_steps(1.0, 0.0) == 4
    policy.ran(["a"], 3.0, 3.0, steps=3)
    assert policy.choose(1, 3.0) == ["a"]
    policy.ran(["a"], 1.0, 4.0)
    assert policy.choose(1, 4.0) == ["b"]


@pytest.mark.parametrize("bad", [{"step_s": 0.0}, {"starvation_s": 0.0}, {"starvation_s": math.nan}])
def test_settings_that_order_nothing_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Mlfq(**bad)  # type: ignore[arg-type]


@dataclass
class Slow:
    """The text of the paper, over all requests at every step. Times are whole steps; q₀ is one."""

    starvation_s: float
    jobs: list[dict[str, float | str]]
    entered: int = 0

    def arrive(self, key: str, first_step_s: float, now_s: float) -> None:
        level = 0
        while 2**level < first_step_s:
            level += 1
        self.entered += 1
        self.jobs.append({"key": key, "level": level, "used": 0.0, "last": now_s, "entered": self.entered})

    def enter(self, one: dict[str, float | str], level: int) -> None:
        self.entered += 1
        one.update(level=level, used=0.0, entered=self.entered)

    def choose(self, batch: int, now_s: float) -> list[str]:
        for one in sorted(self.jobs, key=lambda one: (one["last"], one["key"])):
            if one["level"] and now_s - float(one["last"]) >= self.starvation_s:
                self.enter(one, 0)
        self.jobs.sort(key=lambda one: (one["level"], one["entered"]))
        return [str(one["key"]) for one in self.jobs[:batch]]

    def ran(self, keys: list[str], now_s: float) -> None:
        for key in keys:
            one = next(one for one in self.jobs if one["key"] == key)
            one["last"], one["used"] = now_s, float(one["used"]) + 1
            if float(one["used"]) >= 2 ** int(one["level"]):
                self.enter(one, int(one["level"]) + 1)

    def finish(self, key: str) -> None:
        self.jobs = [one for one in self.jobs if one["key"] != key]


arrivals = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.sampled_from([1, 1, 1, 2, 3, 9])), max_size=40)


@given(arrivals, st.integers(1, 5), st.sampled_from([2.0, 7.0, 20.0, 1e9]))
def test_every_choice_is_that_of_the_reference(
    arriving: list[tuple[int, int, int]], batch: int, starvation_s: float
) -> None:
    policy, slow = Mlfq(step_s=1.0, starvation_s=starvation_s), Slow(starvation_s=starvation_s, jobs=[])
    left: dict[str, int] = {}
    coming = [(gap, f"{index:02}", tokens, float(first)) for index, (gap, tokens, first) in enumerate(arriving)]
    now_s = next_s = 0.0
    while left or coming:
        while coming and now_s >= next_s + coming[0][0]:
            gap, key, tokens, first_step_s = coming.pop(0)
            next_s, left[key] = next_s + gap, tokens
            policy.arrive(job(key, first_step_s=first_step_s), now_s)
            slow.arrive(key, first_step_s, now_s)
        chosen = list(policy.choose(batch, now_s))
        assert chosen == slow.choose(batch, now_s)
        now_s += 1.0
        policy.ran(chosen, 1.0, now_s)
        slow.ran(chosen, now_s)
        for key in chosen:
            left[key] -= 1
            if not left[key]:
                del left[key]
                policy.finish(key)
                slow.finish(key)


def waits_within_the_bound(requests: int, batch: int, starvation_s: float, seed: int) -> int:
    """Runs bursts of requests, and compares every wait with what `mlfq` says of it; says how many were promoted.

    Steps take a second. `entry`: when a request entered the top level, and how many were there, itself included.
    """
    numbers, policy = random.Random(seed), Mlfq(step_s=1.0, starvation_s=starvation_s)
    left: dict[str, int] = {}
    last_s: dict[str, float] = {}
    entry: dict[str, tuple[float, int]] = {}
    now_s, made, promoted = 0.0, 0, 0
    while made < requests or left:
        if made < requests and (not left or numbers.random() < 0.3):
            for _ in range(min(requests - made, numbers.randrange(2 * batch))):
                key, made = str(made), made + 1
                left[key], last_s[key] = (1 if numbers.random() < 0.7 else numbers.randrange(1, 25)), now_s
                policy.arrive(job(key, first_step_s=numbers.choice((1.0, 1.0, 2.0))), now_s)
                if policy.level(key) == 0:
                    entry[key] = (now_s, policy.levels()[0])
        chosen = policy.choose(batch, now_s)
        up = [change.key for change in policy.take_changes() if change.what == "promoted"]
        promoted += len(up)
        for place, key in enumerate(reversed(up)):
            entry[key] = (now_s, policy.levels()[0] - place)
        for key in chosen:
            if key in entry:
                since_s, top = entry.pop(key)
                assert now_s - since_s <= (math.ceil(top / batch) - 1) * 1.0
                assert now_s - last_s[key] <= starvation_s + math.ceil(top / batch) * 1.0
            else:
                assert now_s - last_s[key] < starvation_s
            last_s[key] = now_s + 1.0
            left[key] -= 1
        now_s += 1.0
        policy.ran(chosen, 1.0, now_s)
        for key in chosen:
            if not left[key]:
                del left[key], last_s[key]
                policy.finish(key)
    return promoted


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_nobody_waits_longer_than_the_bound(batch: int) -> None:
    assert waits_within_the_bound(5_000, batch, 10.0, seed=batch) > 100


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_nobody_of_a_million_waits_longer_than_the_bound() -> None:
    assert waits_within_the_bound(1_000_000, 8, 20.0, seed=0) > 10_000
