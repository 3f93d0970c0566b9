"""What a step's decision costs grows with its batch, not with how many requests live: counted, not timed."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from loadtest.schedule_costs import Cost, costs, decisions

if TYPE_CHECKING:
    from _typeshed import TraceFunction

FEW, MANY = 1_000, 4_000
"""Both are more than run before the longest waiting are promoted, sixteen at a time."""


class Bytecodes:
    """A clock for pairs of looks: it runs on what Python executes after a first one, until the second one.

    What one bytecode does to a whole container, such as copying it, counts as one.
    """

    def __init__(self) -> None:
        self._count = 0
        self._runs = False

    def __call__(self) -> float:
        self._runs = not self._runs
        sys.settrace(self._trace if self._runs else None)
        return float(self._count)

    def _trace(self, frame: FrameType, event: str, arg: object) -> TraceFunction:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._count += event == "opcode"
        return self._trace


def growth(found: list[Cost]) -> float:
    """How many times as much is done in a step with MANY as with FEW."""
    few, many = found
    assert (few.live, many.live) == (FEW, MANY)
    return many.mean_ms / few.mean_ms


@pytest.mark.parametrize("name", ["fcfs", "mlfq", "auto"])
def test_a_policy_does_about_as_much_for_a_step_of_many_as_of_few(name: str) -> None:
    assert growth(costs(Bytecodes(), policies=[name], live=(FEW, MANY), batches=(16,), steps=10)) < 1.25


@pytest.mark.parametrize("name", ["fcfs", "mlfq"])
def test_a_worker_decides_about_a_step_of_many_with_about_as_much_work_as_about_one_of_few(name: str) -> None:
    """The swap plan, the blocks and what is carried out included."""
    assert growth(decisions(Bytecodes(), policies=[name], live=(FEW, MANY), batches=(16,), steps=10)) < 1.25


def test_the_clock_counts_what_a_loop_visits() -> None:
    clock = Bytecodes()

    def visit(count: int) -> float:
        begin = clock()
        sum(index for index in range(count))
        return clock() - begin

    assert visit(1000) / visit(100) == pytest.approx(10.0, rel=0.2)
