"""The quanta of feedback queues: level i, counted from 0 at the top, has qᵢ = 2ⁱ·q₀, q₀ being a decode step's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.schedule.policy import Job

LEVELS: Final = 16
"""The last one's quantum is 32,768 steps: longer than any answer."""
MEMORY: Final = 16.0
"""About how many measurements make up q₀."""


@dataclass(slots=True)
class Place:
    """Where a request is."""

    job: Job
    patience_s: float  # how long it waits before it is promoted
    level: int = 0
    due_s: float = 0.0  # when it is to be promoted, as it was known when it last ran, or arrived
    used_s: float = 0.0  # of its level's quantum
    tokens: int = 0  # computed so far
    began: bool = False  # its first step is over, or counts like any other

    def wait(self, now_s: float, quantum_s: float) -> None:
        """From now on it waits. In time for its deadline is as long before as what is left takes in steps of q₀."""
        self.due_s = now_s + self.patience_s
        if (deadline_s := self.job.deadline_s) is not None:
            left = max(1, self.job.most_tokens - self.tokens)
            self.due_s = min(self.due_s, deadline_s - left * quantum_s)


class Ladder:
    """Times are compared to half a step: a quantum is as many steps as come nearest to it, and the top's is one."""

    def __init__(self, step_s: float) -> None:
        """`step_s`: a first guess of q₀."""
        if step_s <= 0:
            raise ValueError(f"step_s: {step_s} is not positive")
        self.quantum_s = step_s

    def measured(self, step_s: float) -> None:
        """A decode step took so long."""
        self.quantum_s += (step_s - self.quantum_s) / MEMORY

    def entry_level(self, first_step_s: float) -> int:
        """Skip-join: the first level whose quantum is at least the first step's time, a prediction."""
        tolerated_s, level = first_step_s - self.quantum_s / 2, 0
        while level + 1 < LEVELS and self.quantum_s * (1 << level) < tolerated_s:
            level += 1
        return level

    def left_s(self, level: int, used_s: float, step_s: float) -> float:
        """What of the quantum may still be used before steps of `step_s` use it up; 0 or less in the top level."""
        if level + 1 == LEVELS:
            return float("inf")
        return (self.quantum_s * (1 << level) if level else 0.0) - used_s - step_s / 2

    def demoted(self, level: int, used_s: float, step_s: float) -> tuple[int, float]:
        """Level, and time used of its quantum, after so much time in equal steps since `level` was entered.

        One level further after one step; after several at once maybe more, and then part of a quantum may be used.
        """
        while used_s > 0 and self.left_s(level, used_s, step_s) < 0:
            steps = max(1, round(self.quantum_s * (1 << level) / step_s)) if level else 1
            used_s = max(0.0, used_s - steps * step_s)
            level += 1
        return level, used_s

    def enst_s(self, requests: Sequence[int], batch: int) -> list[float]:
        """Estimated next scheduled time by level, with so many requests in each (FastServe, section 5):

        ENST(i) = 1 ÷ B · Σ over higher-priority j of Σ_{k = level(j)}^{level(i) − 1} q_k.

        The inner sum is q_level(i) − q_level(j), as quanta double: one value for all of a level.
        """
        ahead, quanta = 0, 0  # requests above, and Σ of their levels' quanta in units of q₀
        times = []
        for level, count in enumerate(requests):
            times.append((ahead * (1 << level) - quanta) * self.quantum_s / batch)
            ahead += count
            quanta += count * (1 << level)
        return times
