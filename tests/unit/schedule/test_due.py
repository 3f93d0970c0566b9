"""Who is due: in order of time, those that ran meanwhile later, and nothing piles up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.schedule.due import Due


@given(st.lists(st.tuples(st.sampled_from("alrt"), st.integers(0, 9), st.integers(0, 12)), max_size=80))
def test_any_sequence_of_moves_agrees_with_a_look_at_all(moves: list[tuple[str, int, int]]) -> None:
    """Moves: add, become later, remove, take what is due. What is known of a key is kept beside."""
    times, oracle = dict[str, float](), set[str]()
    due, now_s = Due(times.__getitem__), 0.0
    for move, number, delay in moves:
        key = str(number)
        if move == "a" and key not in oracle:
            times[key] = now_s + delay
            due.add(key, times[key])
            oracle.add(key)
        elif move == "l" and key in oracle:
            times[key] += delay
        elif move == "r":
            due.discard(key)
            oracle.discard(key)
        elif move == "t":
            now_s += delay
            expected = sorted((times[key], key) for key in oracle if times[key] <= now_s)
            assert list(due.take(now_s)) == [key for _, key in expected]
            oracle -= {key for _, key in expected}
        assert due.next_s() <= min((times[key] for key in oracle), default=math.inf)
        assert set(due.soonest(99, math.inf)) == oracle


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4])
def test_the_soonest_come_first_whether_they_share_a_time_or_not(limit: int) -> None:
    due = Due(lambda key: math.inf)
    for key, at_s in (("c", 3.0), ("a", 1.0), ("b", 1.0), ("never", math.inf)):
        due.add(key, at_s)
    assert due.soonest(limit, math.inf) == ["a", "b", "c"][:limit]
    assert due.soonest(limit, 2.0) == ["a", "b"][:limit]


def test_times_of_nobody_do_not_pile_up() -> None:
    due = Due(lambda key: math.inf)
    for index in range(10_000):
        due.add(str(index), float(index))
        due.discard(str(index))
    assert len(due._times) == len(due._at) < 100
