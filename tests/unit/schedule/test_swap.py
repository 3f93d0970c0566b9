"""Swap plans: who leaves, who comes back, and what never happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.latency import PrefillFit
from services.schedule.budget import MOST_DELAY, MOST_RESERVE, Bandwidth, Reserve
from services.schedule.policy import Next
from services.schedule.swap import SwapMode, Swapper
from services.schedule.swap_view import Plan, View

BLOCK_BYTES = 100


def swapper(mode: SwapMode = SwapMode.PROACTIVE, *, bytes_per_s: float = 1e5, slow_prefill: bool = True) -> Swapper:
    """A block is copied in a millisecond; ten thousand fit beside a step of ten seconds."""
    prefill = PrefillFit(a_s=10.0 if slow_prefill else 0.0, b_s=0.0, c_s=0.0, chunk_tokens=1 << 20, error=0.0, steps=0)
    return Swapper(
        mode=mode,
        block_bytes=BLOCK_BYTES,
        block_tokens=16,
        bandwidth=Bandwidth(bytes_per_s=bytes_per_s),
        reserve=Reserve(total_blocks=1000),
        prefill=prefill,
    )


def view(
    chosen: str,
    *,
    resident: Mapping[str, int] | None = None,
    host: Mapping[str, int] | None = None,
    enst_s: Mapping[str, float] | None = None,
    needs: Mapping[str, int] | None = None,
    free: int = 0,
    moving: str = "",
    freeing: int = 0,
    filling: bool = False,
    host_free: int = 1000,
) -> View:
    """Requests are letters; whoever is chosen has ENST 0, others what is said or 100 s."""
    resident, host, needs = resident or {}, host or {}, needs or {}
    times = dict.fromkeys((*resident, *host), 100.0) | dict(enst_s or {}) | dict.fromkeys(chosen, 0.0)

    def of(keys: Sequence[str]) -> Sequence[float]:
        return [times[key] for key in keys]

    return View(
        batch=max(1, len(chosen)),
        chosen=list(chosen),
        upcoming=[Next(key=key, enst_s=times[key]) for key in sorted(times, key=times.__getitem__)],
        resident=resident,
        host=host,
        moving=set(moving),
        needs=lambda key: needs.get(key, host.get(key, 0)),
        enst_s=of,
        free=free,
        freeing=freeing,
        filling=filling,
        host_free=host_free,
        step_s=10.0,
    )


def names(keys: Sequence[str]) -> str:
    return "".join(keys)


def test_with_room_for_all_nothing_moves() -> None:
    plan = swapper().plan(view("ab", resident={"a": 5, "b": 5}, needs={"a": 1}, free=1))
    assert plan == Plan(run=["a", "b"])


def test_the_largest_enst_leaves_for_what_the_step_lacks() -> None:
    plan = swapper().plan(
        view("an", resident={"a": 5, "b": 5, "c": 5}, enst_s={"b": 30.0, "c": 40.0}, needs={"n": 3}, free=2)
    )
    assert (names(plan.out), names(plan.back), names(plan.drop)) == ("c", "", "")
    assert plan.run == ["a", "b"]  # a place that the new one leaves free is not left empty


def test_the_smallest_enst_comes_back_ahead_of_need_and_never_beside_one_that_leaves() -> None:
    away = view("a", resident={"a": 5}, host={"x": 4, "y": 4}, enst_s={"x": 20.0, "y": 10.0}, free=6)
    assert names(swapper().plan(away).back) == "y"
    leaving = view("a", resident={"a": 5}, host={"x": 4}, free=6, moving="z", freeing=3)
    assert swapper().plan(leaving) == Plan(run=["a"])


@pytest.mark.parametrize(
    ("free", "leaving", "run", "back"),
    [(4, 0, "", ""), (4, 1, "", ""), (4, 3, "n", ""), (6, 0, "", "x"), (7, 0, "n", "x")],
)
@pytest.mark.parametrize("chosen", ["xn", "x"], ids=["both are chosen", "the new one is not"])
def test_who_is_new_gets_what_the_first_of_the_chosen_who_is_away_leaves(
    chosen: str, free: int, leaving: int, run: str, back: str
) -> None:
    """x waits for five blocks, n for two. What others free on their way out counts for x."""
    moving = "z" if leaving else ""
    seen = view(chosen, host={"x": 5}, needs={"n": 2}, enst_s={"n": 1.0}, free=free, moving=moving, freeing=leaving)
    plan = swapper().plan(seen)
    assert (names(plan.run), names(plan.back)) == (run, back)


def test_room_is_made_for_the_first_of_the_chosen_who_is_away_and_not_for_those_behind_it() -> None:
    """b is enough for x, and n runs when x is here."""
    plan = swapper().plan(view("xn", resident={"b": 5, "c": 5}, host={"x": 5}, needs={"n": 2}, enst_s={"b": 200.0}))
    assert (names(plan.out), names(plan.run)) == ("b", "c")


def test_nobody_leaves_while_somebody_comes_in() -> None:
    coming = view("an", resident={"a": 5, "b": 5}, needs={"n": 3}, free=0, moving="x", filling=True)
    assert swapper().plan(coming) == Plan(run=["a", "b"])


def test_an_exchange_has_to_gain_more_than_it_takes() -> None:
    """x is needed at once; an exchange takes 2 × 4 ms."""
    for wanted, leaves in ((0.007, ""), (0.009, "b")):
        plan = swapper().plan(view("x", resident={"b": 4}, host={"x": 4}, enst_s={"b": wanted}, free=0))
        assert names(plan.out) == leaves
        assert names(plan.run) == ("" if leaves else "b")


def test_what_steps_asked_for_lately_stays_free_for_a_burst() -> None:
    planner = swapper()
    planner.reserve.asked(5)
    assert names(planner.plan(view("a", resident={"a": 5}, host={"x": 4}, free=8)).back) == ""
    assert names(planner.plan(view("a", resident={"a": 5}, host={"x": 4}, free=9)).back) == "x"
    assert names(planner.plan(view("a", resident={"a": 5, "b": 5}, free=4)).out) == "b"
    assert names(planner.plan(view("ax", resident={"a": 5}, host={"x": 4}, free=4)).back) == "x"  # its turn has come


def test_copies_stay_within_the_bandwidth_of_a_step_except_that_one_may_always_go() -> None:
    slow = swapper(bytes_per_s=100.0)  # ten blocks a step
    host = {"v": 6, "w": 4, "x": 4, "y": 4}
    assert len(slow.plan(view("a", resident={"a": 5}, host=host, free=50)).back) == 2
    assert len(slow.plan(view("a", resident={"a": 5}, host={"x": 40, "y": 4}, free=50)).back) == 1
    busy = view("a", resident={"a": 5}, host={"x": 40}, free=50, moving="y", filling=True)
    assert slow.plan(busy).back == []


def test_what_is_sooner_computed_than_copied_or_has_no_room_on_the_host_is_dropped() -> None:
    lacking = view("an", resident={"a": 5, "b": 5}, needs={"n": 3})
    assert names(swapper(slow_prefill=False).plan(lacking).drop) == "b"
    assert names(swapper(SwapMode.RECOMPUTE).plan(lacking).drop) == "b"
    full = view("an", resident={"a": 5, "b": 5}, needs={"n": 3}, host_free=4)
    assert names(swapper().plan(full).drop) == "b"


def test_reactive_fetches_what_is_chosen_and_evicts_for_it_in_the_same_step() -> None:
    plan = swapper(SwapMode.REACTIVE).plan(view("ax", resident={"a": 5, "b": 5}, host={"x": 4}, free=0))
    assert plan == Plan(run=["a", "x"], out=["b"], back=["x"])


@pytest.mark.parametrize("mode", SwapMode)
def test_with_nobody_able_to_run_somebody_is_always_helped(mode: SwapMode) -> None:
    """Whatever fits into the pool of ten is here but cannot grow, or is away with nobody in its way."""
    grown = view("ab", resident={"a": 5, "b": 5}, needs={"a": 1, "b": 1}, free=0)
    plan = swapper(mode).plan(grown)
    assert names([*plan.out, *plan.drop]) == "b"
    away = view("xy", host={"x": 9, "y": 9}, free=10)
    assert names(swapper(mode).plan(away).back) == "x"


requests = st.lists(
    st.tuples(st.sampled_from("rhmn"), st.integers(1, 9), st.integers(0, 3), st.floats(0, 50)), min_size=1, max_size=12
)


@given(requests, st.integers(1, 6), st.integers(0, 12), st.sampled_from(list(SwapMode)), st.booleans())
def test_a_plan_fits_into_memory_and_moves_nobody_twice(
    made: list[tuple[str, int, int, float]], batch: int, free: int, mode: SwapMode, filling: bool
) -> None:
    """r: resident, h: on the host, m: moving, n: new, each with blocks, needs and an ENST."""
    keys = {chr(97 + index): one for index, one in enumerate(made)}
    if mode is not SwapMode.PROACTIVE:
        keys = {key: one for key, one in keys.items() if one[0] != "m"}
    order = sorted(keys, key=lambda key: keys[key][3])
    seen = view(
        names(order[:batch]),
        resident={key: one[1] for key, one in keys.items() if one[0] == "r"},
        host={key: one[1] for key, one in keys.items() if one[0] == "h"},
        enst_s={key: one[3] for key, one in keys.items() if one[0] in "rh"},
        needs={key: one[2] + (one[1] if one[0] in "hn" else 0) for key, one in keys.items()},
        free=free,
        moving=names([key for key, one in keys.items() if one[0] == "m"]),
        filling=filling and mode is SwapMode.PROACTIVE,
    )
    plan = swapper(mode).plan(seen)
    gone = {*plan.out, *plan.drop}
    assert len(plan.run) == len(set(plan.run)) <= batch
    assert gone <= set(seen.resident)
    assert set(plan.back) <= set(seen.host)
    assert not gone & {*plan.run, *plan.back}
    freed = sum(seen.resident[key] for key in (plan.drop if mode is SwapMode.PROACTIVE else gone))
    used = sum(seen.needs(key) for key in plan.run)
    if mode is SwapMode.PROACTIVE:
        assert not (plan.out and plan.back)
        assert not set(plan.run) & {*seen.host, *seen.moving}
        used += sum(seen.host[key] for key in plan.back)
    else:
        assert set(plan.back) <= set(plan.run)
    assert used <= free + freed


def test_the_budget_learns_how_fast_copies_are_and_what_they_delay() -> None:
    bandwidth = Bandwidth(bytes_per_s=1000.0)
    assert bandwidth.allowed_bytes(2.0) == 2000.0
    for _ in range(200):
        bandwidth.copied(500, 1.0)
        bandwidth.delayed(500, 0.1)
    assert bandwidth.bytes_per_s == pytest.approx(500, rel=1e-3)
    allowed = bandwidth.allowed_bytes(2.0)
    assert allowed == pytest.approx(500)
    assert allowed * 0.1 / 500 <= MOST_DELAY * 2.0 * 1.001


def test_the_reserve_remembers_a_burst_for_a_while_and_is_bounded() -> None:
    reserve = Reserve(total_blocks=800)
    assert reserve.blocks == 0
    reserve.asked(40)
    assert reserve.blocks == 40
    for _ in range(69):
        reserve.asked(0)
    assert reserve.blocks == 20
    reserve.asked(10_000)
    assert reserve.blocks == 800 // MOST_RESERVE
