"""Runs of free blocks: the best fit, neighbours joined again, and never another set than a plain set would be."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.free_runs import FreeRuns


def runs_of(blocks: list[int]) -> int:
    """Number of runs of neighbours in a list of blocks."""
    return bool(blocks) + sum(second != first + 1 for first, second in pairwise(blocks))


def holes(*runs: tuple[int, int], total: int = 100) -> FreeRuns:
    """Free are only the runs [first, end)."""
    free = FreeRuns(total)
    free.take(total)
    for first, end in runs:
        free.give(range(first, end))
    return free


@pytest.mark.parametrize("blocks", [0, 1, 7, 8])
def test_a_whole_set_gives_its_first_blocks_in_order(blocks: int) -> None:
    free = FreeRuns(8)
    assert free.take(blocks) == list(range(blocks))
    assert (len(free), sorted(free)) == (8 - blocks, list(range(blocks, 8)))


def test_the_shortest_run_that_suffices_is_taken_and_of_equal_ones_the_first() -> None:
    free = holes((10, 20), (30, 34), (40, 43), (50, 53))
    assert free.take(3) == [40, 41, 42]
    assert free.take(3) == [50, 51, 52]
    assert free.take(3) == [30, 31, 32]
    assert sorted(free) == [*range(10, 20), 33]


def test_where_no_run_suffices_the_longest_are_taken_and_the_blocks_ascend() -> None:
    free = holes((0, 2), (10, 15), (20, 26), (30, 31))
    assert free.take(9) == [10, 11, 12, *range(20, 26)]


def test_the_run_after_a_block_is_continued_even_where_another_would_fit_better() -> None:
    free = holes((10, 20), (30, 32))
    assert free.take(2, after=9) == [10, 11]
    assert free.take(3, after=29) == [30, 31, 12]
    assert free.take(2, after=50) == [13, 14]


@pytest.mark.parametrize("order", [[3, 4, 5], [5, 4, 3], [3, 5, 4]])
def test_blocks_that_come_back_join_their_neighbours_on_both_sides(order: list[int]) -> None:
    free = holes((0, 3), (6, 9))
    for block in order:
        free.give([block])
        free.check()
    assert free.take(9) == list(range(9))


class FreeMachine(RuleBasedStateMachine):
    """Any sequence of takes and gives leaves the set that a plain set would be, in maximal runs."""

    TOTAL = 24

    def __init__(self) -> None:
        super().__init__()
        self.free = FreeRuns(self.TOTAL)
        self.oracle = set(range(self.TOTAL))
        self.taken: list[int] = []

    @rule(share=st.floats(0, 1), after=st.none() | st.integers(0, TOTAL))
    def take(self, share: float, after: int | None) -> None:
        blocks = round(share * len(self.oracle))
        before = sorted(self.oracle)
        taken = self.free.take(blocks, after=after)
        assert len(set(taken)) == blocks and set(taken) <= self.oracle
        ends = {block for block in before if block + 1 not in self.oracle}
        longest = max((length(end, self.oracle) for end in ends), default=0)
        if after is not None and blocks and after + 1 in self.oracle and after not in self.oracle:
            assert taken[0] == after + 1
        elif 0 < blocks <= longest:
            assert runs_of(taken) == 1
        self.oracle -= set(taken)
        self.taken += taken

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        back = data.draw(st.lists(st.sampled_from(self.taken), unique=True))
        self.free.give(back)
        self.oracle |= set(back)
        self.taken = [block for block in self.taken if block not in back]

    @invariant()
    def it_is_the_set(self) -> None:
        self.free.check()
        assert set(self.free) == self.oracle and len(self.free) == len(self.oracle)


def length(end: int, blocks: set[int]) -> int:
    """Length of the run that ends with `end`."""
    first = end
    while first - 1 in blocks:
        first -= 1
    return end - first + 1


FreeMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestAnySequenceOfTakesAndGives = FreeMachine.TestCase
