"""A queue by rank: what it says is first, against a sorted list; ends of the sorted part and of the heap included."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.schedule.ranked import FRONT, RankedQueue


@pytest.mark.parametrize("count", [0, 1, FRONT - 1, FRONT, FRONT + 1, 3 * FRONT])
def test_keys_come_by_rank_and_equal_ranks_in_order_of_entry(count: int) -> None:
    queue, ranks = RankedQueue(), {str(i): i * 7919 % 10 for i in range(count)}
    for key, rank in ranks.items():
        queue.add(key, rank)
    assert queue.first(count + 1) == sorted(ranks, key=ranks.__getitem__)
    assert len(queue) == count


def test_a_key_enters_once_and_leaves_once() -> None:
    queue = RankedQueue()
    queue.add("a", 1)
    with pytest.raises(ValueError, match="'a' is queued already"):
        queue.add("a", 2)
    queue.remove("a")
    with pytest.raises(KeyError):
        queue.remove("a")
    assert "a" not in queue
    assert queue.first(1) == []


def test_removed_entries_do_not_pile_up() -> None:
    queue = RankedQueue()
    for index in range(20 * FRONT):
        queue.add(str(index), -index)
        queue.add(f"far {index}", 1e9)
        queue.remove(f"far {index}")
    assert len(queue._front) + len(queue._line) + len(queue._heap) <= 3 * len(queue) + 2 * FRONT


@given(st.lists(st.tuples(st.sampled_from("are"), st.integers(0, 5), st.integers(0, 12)), max_size=120))
def test_any_sequence_of_entries_removals_and_looks_agrees_with_a_sorted_list(
    moves: list[tuple[str, int, int]],
) -> None:
    queue, oracle = RankedQueue(), dict[str, tuple[int, int]]()
    for turn, (move, rank, number) in enumerate(moves):
        key = str(number)
        if move == "a" and key not in oracle:
            queue.add(key, rank)
            oracle[key] = (rank, turn)
        elif move == "r" and key in oracle:
            queue.remove(key)
            del oracle[key]
        assert queue.first(number) == sorted(oracle, key=oracle.__getitem__)[:number]
        assert len(queue) == len(oracle)


def test_many_keys_keep_their_order_while_the_first_ones_leave() -> None:
    numbers = random.Random(0)
    queue, oracle = RankedQueue(), dict[str, tuple[float, int]]()
    for index in range(4000):
        oracle[str(index)] = (numbers.random(), index)
        queue.add(str(index), oracle[str(index)][0])
    while oracle:
        expected = sorted(oracle, key=oracle.__getitem__)[:97]
        assert queue.first(97) == expected
        for key in expected:
            queue.remove(key)
            del oracle[key]
