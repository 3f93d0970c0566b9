"""First come, first served where feedback queues would lose, feedback queues where they win: by what is observed.

It starts first come, first served, knowing nothing. From the service times of what has completed lately (`WINDOW` of
them) it predicts what feedback queues would gain (`gain`), and turns to them above ENTER, back below LEAVE: two
bounds, so that it does not waver between two schedules that are equally good. Both lie a little below 1: where requests
complete alike, feedback queues answer sooner. It turns only if somebody had to wait since it last looked: without a
queue both are the same.

It is first come, first served, too, where prompts take more than CROWDED of the time of an engine that decodes as well:
feedback queues would let every row, which costs such an engine next to nothing, wait for all prompts that are above it,
and answers would end late.

It turns to feedback queues as well when a tenant lacks LAG_TOKENS of its share, and stays until all that live run:
first come, first served knows no shares, and what is left of a flood of one tenant would hold all others again.

Where lengths are known when requests arrive (prompts on a prefill worker), it is `shortest` from the beginning instead
of first come, first served, and feedback queues, which are for lengths that nobody knows, have nothing to gain.

Both schedules are kept up to date all the time, so that a turn costs nothing and nobody's history is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from services.schedule.fcfs import fcfs
from services.schedule.gain import predicted_gain
from services.schedule.mlfq import Mlfq
from services.schedule.policy import Change, Job, Next, Policy
from services.schedule.shortest import shortest

ENTER: Final = 0.98
LEAVE: Final = 0.95
WINDOW: Final = 1024
"""Of so many completions a predicted gain near 1 still varies by 0.02."""
LEAST: Final = 64
"""Completions before it predicts anything."""
LAG_TOKENS: Final = 512.0
EVERY: Final = 8
"""Completions between two looks."""
CROWDED: Final = 0.75
ROOMY: Final = 0.65
"""Shares of the time that prompts take: first come, first served above the first, until it is below the second."""
LEAST_ROWS: Final = 0.05
"""Of the time. An engine whose rows take less decodes nothing, but for prompts that one token is left of."""
MEMORY: Final = 32
"""About how many looks make up the share of prompts."""


class Auto:
    """A policy (see `Policy`) that is one of two at any time."""

    def __init__(self, queues: Mlfq, *, sized: bool = False) -> None:
        """`queues`: the feedback queues to turn to, empty. `sized`: the first step of a job is all that it needs."""
        self._sized = sized
        self._line = shortest() if sized else fcfs()
        self._mlfq = queues
        self._policy: Policy = self._line
        self._used_s: dict[str, float] = {}
        self._completed_s: deque[float] = deque(maxlen=WINDOW)
        self._prompts_s = 0.0  # lately
        self._rows_s = 0.0
        self._crowded = False  # by prompts
        self._unseen = 0
        self._queued = False
        self._unfair = False  # since somebody was behind there were always more than run
        self._now_s = 0.0
        self._changes: list[Change] = []
        self.gain = 0.0 if sized else (ENTER + LEAVE) / 2  # nothing is known, and no reason to turn

    @property
    def name(self) -> str:
        """See Policy."""
        return "auto"

    @property
    def mode(self) -> str:
        """The name of what it is now."""
        return self._policy.name

    def arrive(self, job: Job, now_s: float) -> None:
        """See Policy."""
        self._mlfq.arrive(job, now_s)
        self._line.arrive(job, now_s)
        self._used_s[job.key] = 0.0

    def choose(self, batch: int, now_s: float) -> Sequence[str]:
        """See Policy."""
        self._now_s = now_s
        queued = len(self._used_s) > batch
        self._queued, self._unfair = self._queued or queued, self._unfair and queued
        if self._unseen >= EVERY:
            self._look()
        return self._policy.choose(batch, now_s)

    def ran(self, keys: Iterable[str], seconds: float, now_s: float, *, steps: int = 1) -> None:
        """See Policy."""
        keys = list(keys)
        self._mlfq.ran(keys, seconds, now_s, steps=steps)
        self._rows_s += seconds
        for key in keys:
            self._used_s[key] += seconds

    def computed(self, key: str, seconds: float, now_s: float, *, tokens: int, first: bool = False) -> None:
        """See Policy."""
        self._mlfq.computed(key, seconds, now_s, tokens=tokens, first=first)
        self._prompts_s += seconds
        self._used_s[key] += seconds

    def finish(self, key: str, *, completed: bool = True) -> None:
        """See Policy."""
        self._mlfq.finish(key)
        self._line.finish(key)
        used_s = self._used_s.pop(key)
        if completed:
            self._completed_s.append(used_s)
            self._unseen += 1

    def measured(self, step_s: float) -> None:
        """See Policy."""
        self._mlfq.measured(step_s)
        self._line.measured(step_s)

    def steady_steps(self, step_s: float, now_s: float) -> int:
        """See Policy."""
        return self._policy.steady_steps(step_s, now_s)

    def upcoming(self, limit: int, batch: int, now_s: float) -> Sequence[Next]:
        """See Policy."""
        return self._policy.upcoming(limit, batch, now_s)

    def enst_s(self, keys: Iterable[str], batch: int, now_s: float) -> Sequence[float]:
        """See Policy."""
        return self._policy.enst_s(keys, batch, now_s)

    def level(self, key: str) -> int:
        """See Policy."""
        return self._policy.level(key)

    def levels(self) -> Sequence[int]:
        """See Policy."""
        return self._policy.levels()

    def take_changes(self) -> list[Change]:
        """See Policy; a turn is a change of mode. What moves in queues that do not decide is nobody's news."""
        moved = self._mlfq.take_changes()
        changes, self._changes = self._changes, []
        return changes + moved if self._policy is self._mlfq else changes

    def _look(self) -> None:
        self._unseen = 0
        if len(self._completed_s) >= LEAST and not self._sized:
            self.gain = predicted_gain(self._completed_s, self._mlfq.quantum_s)
        self._unfair = self._unfair or self._mlfq.largest_lag > LAG_TOKENS
        self._look_at_prompts()
        if self._policy is self._mlfq:
            turn = (self.gain < LEAVE or self._crowded) and not self._unfair
        else:
            turn = (self.gain > ENTER and not self._crowded) or self._unfair
        if turn and self._queued:
            self._policy = self._line if self._policy is self._mlfq else self._mlfq
            prompts = ", prompts take most of the time" if self._crowded else ""
            reason = ", a tenant behind its share" if self._unfair else prompts
            detail = f"{self.mode}: predicted gain {self.gain:.2f}{reason}"
            self._changes.append(Change(key="", what="mode", at_s=self._now_s, detail=detail))
        self._queued = False

    def _look_at_prompts(self) -> None:
        """Whether they take most of the time, and rows the rest. Forgets a part of what it goes by."""
        prompts_s, rows_s = self._prompts_s, self._rows_s
        self._prompts_s, self._rows_s = prompts_s * (1 - 1 / MEMORY), rows_s * (1 - 1 / MEMORY)
        both_s = prompts_s + rows_s
        most = ROOMY if self._crowded else CROWDED
        self._crowded = prompts_s > most * both_s and rows_s > LEAST_ROWS * both_s
