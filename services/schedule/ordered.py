"""Policies that are one order over all requests: a rank for each, smallest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from services.schedule.policy import MANY, Change, Job, Next
from services.schedule.ranked import RankedQueue

SIGHT: Final = 8
"""How many batches ahead times are estimated. Beyond, a request's turn is further off than anybody plans for."""


class Ordered:
    """A policy (see `Policy`) by rank; equal ranks go first come, first served. Preempts for a smaller rank only."""

    def __init__(self, name: str, rank: Callable[[Job, float], float], *, shrinks: bool = False) -> None:
        """`rank`: of a job that arrives at a time, for good. `shrinks`: it is a time to go, and becomes smaller by
        what a request was charged.
        """
        self._name = name
        self._rank = rank
        self._shrinks = shrinks
        self._queue = RankedQueue()
        self._step_s = 0.0

    @property
    def name(self) -> str:
        """See Policy."""
        return self._name

    def arrive(self, job: Job, now_s: float) -> None:
        """See Policy."""
        self._queue.add(job.key, self._rank(job, now_s))

    def choose(self, batch: int, now_s: float) -> Sequence[str]:
        """See Policy."""
        return self._queue.first(batch)

    def ran(self, keys: Iterable[str], seconds: float, now_s: float, *, steps: int = 1) -> None:
        """See Policy."""
        if self._shrinks:
            for key in keys:
                rank = self._queue.rank(key)
                self._queue.remove(key)
                self._queue.add(key, rank - seconds)

    def computed(self, key: str, seconds: float, now_s: float, *, tokens: int, first: bool = False) -> None:
        """See Policy."""
        self.ran([key], seconds, now_s)

    def finish(self, key: str, *, completed: bool = True) -> None:
        """See Policy."""
        self._queue.remove(key)

    def measured(self, step_s: float) -> None:
        """See Policy."""
        self._step_s = step_s

    def steady_steps(self, step_s: float, now_s: float) -> int:
        """See Policy: those that run only get further ahead."""
        return MANY

    def upcoming(self, limit: int, batch: int, now_s: float) -> Sequence[Next]:
        """See Policy."""
        keys = self._queue.first(limit)
        return [Next(key, place // batch * self._step_s) for place, key in enumerate(keys)]

    def enst_s(self, keys: Iterable[str], batch: int, now_s: float) -> Sequence[float]:
        """See Policy; infinite beyond the next SIGHT batches."""
        places = {key: place for place, key in enumerate(self._queue.first(SIGHT * batch))}
        return [places[key] // batch * self._step_s if key in places else self._beyond(key) for key in keys]

    def level(self, key: str) -> int:
        """See Policy: there is one."""
        self._queue.rank(key)
        return 0

    def levels(self) -> Sequence[int]:
        """See Policy."""
        return (len(self._queue),)

    def take_changes(self) -> list[Change]:
        """See Policy."""
        return []

    def _beyond(self, key: str) -> float:
        self._queue.rank(key)
        return float("inf")
