"""Skip-join multi-level feedback queues (FastServe: Wu et al., arXiv 2305.05920, section 4).

Levels       level i, from 0 at the top, has the quantum qᵢ = 2ⁱ·q₀, q₀ being the measured time of a decode step
             (`ladder`). A request runs one step in level 0, and in level i as many as come nearest to qᵢ.
Skip-join    a request joins at the first level whose quantum is at least its predicted first step's time.
             `mlfq-naive` lets everybody join at the top.
Demotion     when the quantum is used up, one level down with used time 0; not from the last level, and not while its
             tenant is behind its share (`shares`): then it goes to the end of the top again.
Promotion    when it has waited for the starvation limit α, to the end of the top with used time 0.
Order        levels from the top; inside one first in, first out among the requests of one tenant, between tenants by
             weights (`shares.Level`). Preemption happens between steps only, since only there `choose` is asked.

A request's own wishes go through the same two doors, patience and place. Priority p: its patience is α·2⁻ᵖ, and in each
level it enters ahead of so many of its tenant's quanta. Deadline: it is due for promotion when what it may still have
to compute would no longer be done in time.

How long can a request wait? Let it be admitted, without a deadline, of priority 0 like all others, of one tenant, and
let s be the longest step meanwhile (q₀ = s where they are alike). It is promoted at the first step's end that comes α
after it last ran; so far it waited α + s at most. Let L be the requests of the top level then, itself included. Only
the L − 1 ahead of it pass it: later ones enter behind. Each of them runs one step and leaves the level; B run at a
time, the front first. So it waits for ⌊(L − 1) ÷ B⌋ = ⌈L ÷ B⌉ − 1 more steps at most:

    wait  ≤  α + ⌈L ÷ B⌉·s + the time to have its KV back, if that was swapped out.

With several tenants let n of the L be its own: Σₖ(wₖ·n ÷ w + 1) + n − 1 take the place of L − 1 (`shares`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from services.schedule.due import Due
from services.schedule.ladder import LEVELS, Ladder
from services.schedule.policy import MANY, Change, Job, Next
from services.schedule.shares import Level, Shares

STARVATION_S: Final = 1.0
"""α. The paper has 0.3 s; in simulation 1 s costs nothing in mean completion, and under overload short answers, which
share the top with those that starve, come out a third sooner for each token.
"""


@dataclass(slots=True)
class _Place:
    job: Job
    patience_s: float  # how long it waits before it is promoted
    level: int = 0
    due_s: float = 0.0  # when it is to be promoted, as it was known when it last ran, or arrived
    used_s: float = 0.0  # of its level's quantum
    tokens: int = 0  # computed so far


class Mlfq:
    """A policy (see `Policy`). A step costs O((batch + promotions)·log n + levels)."""

    def __init__(self, *, step_s: float = 0.03, starvation_s: float = STARVATION_S, skip_join: bool = True) -> None:
        """`step_s`: a first guess of q₀. `starvation_s`: α; infinite means that nobody is promoted."""
        if not starvation_s > 0:
            raise ValueError(f"starvation_s: {starvation_s} is not positive")
        self._ladder = Ladder(step_s)
        self._starvation_s = starvation_s
        self._skip_join = skip_join
        self._places: dict[str, _Place] = {}
        self._levels = [Level() for _ in range(LEVELS)]
        self._shares = Shares()
        self._due = Due(lambda key: self._places[key].due_s)
        self._chosen: list[str] = []
        self._changes: list[Change] = []

    @property
    def name(self) -> str:
        """See Policy."""
        return "mlfq" if self._skip_join else "mlfq-naive"

    @property
    def quantum_s(self) -> float:
        """q₀: what a decode step takes now."""
        return self._ladder.quantum_s

    @property
    def largest_lag(self) -> float:
        """Tokens, for a tenant of weight 1, that some tenant lacks of its share."""
        return self._shares.largest_lag()

    def arrive(self, job: Job, now_s: float) -> None:
        """See Policy."""
        if job.key in self._places:
            raise ValueError(f"{job.key!r} is queued already")
        place = self._places[job.key] = _Place(job=job, patience_s=self._starvation_s / 2.0**job.priority)
        self._wait(place, now_s)
        self._shares.join(job.tenant, job.weight)
        self._enter(place, self._ladder.entry_level(job.first_step_s) if self._skip_join else 0)

    def choose(self, batch: int, now_s: float) -> Sequence[str]:
        """See Policy."""
        for key in self._due.take(now_s):
            if (place := self._places[key]).level:
                self._move(place, 0, now_s, "promoted")
        chosen: list[str] = []
        for level in self._levels:
            if len(chosen) == batch:
                break
            if level:
                chosen += level.serve(batch - len(chosen))
        self._chosen = chosen
        return chosen

    def ran(self, keys: Iterable[str], seconds: float, now_s: float, *, tokens: int = 1, steps: int = 1) -> None:
        """See Policy."""
        step_s = seconds / steps
        for key in keys:
            place = self._places[key]
            place.used_s += seconds
            place.tokens += tokens
            self._wait(place, now_s)
            self._shares.serve(place.job.tenant, tokens)
            if self._ladder.left_s(place.level, place.used_s, step_s) < 0:
                self._demote(place, step_s, now_s)

    def finish(self, key: str, *, completed: bool = True) -> None:
        """See Policy."""
        place = self._places.pop(key)
        self._levels[place.level].leave(key)
        self._shares.leave(place.job.tenant)
        self._due.discard(key)

    def measured(self, step_s: float) -> None:
        """See Policy."""
        self._ladder.measured(step_s)

    def steady_steps(self, step_s: float, now_s: float) -> int:
        """See Policy."""
        if len(self._places) <= len(self._chosen):
            return MANY  # everybody runs, at whatever level
        left_s = self._due.next_s() - now_s
        for key in self._chosen:
            place = self._places[key]
            left_s = min(left_s, self._ladder.left_s(place.level, place.used_s, step_s))
        return MANY if left_s >= MANY * step_s else max(1, int(left_s / step_s) + 1)

    def upcoming(self, limit: int, batch: int, now_s: float) -> Sequence[Next]:
        """See Policy."""
        line: list[str] = []
        for level in self._levels:
            line += level.first(limit - len(line))
        times = dict(zip(line, self.enst_s(line, batch, now_s), strict=True))
        until_s = now_s + max(times.values(), default=0.0)
        due = [key for _, key in self._due.soonest(limit, until_s) if key not in times]
        times |= zip(due, self.enst_s(due, batch, now_s), strict=True)
        return [Next(key, times[key]) for key in sorted(times, key=times.__getitem__)[:limit]]

    def enst_s(self, keys: Iterable[str], batch: int, now_s: float) -> Sequence[float]:
        """See Policy: min(time to promotion, its level's (`Ladder.enst_s`)). What was chosen to run now has 0."""
        of_level, places = self._ladder.enst_s(self.levels(), batch), self._places
        chosen = set(self._chosen)
        return [
            0.0 if key in chosen else max(0.0, min((one := places[key]).due_s - now_s, of_level[one.level]))
            for key in keys
        ]

    def level(self, key: str) -> int:
        """See Policy."""
        return self._places[key].level

    def levels(self) -> Sequence[int]:
        """See Policy."""
        return [len(level) for level in self._levels]

    def take_changes(self) -> list[Change]:
        """See Policy."""
        changes, self._changes = self._changes, []
        return changes

    def _wait(self, place: _Place, now_s: float) -> None:
        """From now on it waits."""
        place.due_s = now_s + place.patience_s
        if (deadline_s := place.job.deadline_s) is not None:
            left = max(1, place.job.most_tokens - place.tokens)
            place.due_s = min(place.due_s, deadline_s - left * self.quantum_s)

    def _demote(self, place: _Place, step_s: float, now_s: float) -> None:
        if self._shares.behind(place.job.tenant):
            self._move(place, 0, now_s, "kept")
            return
        level, used_s = self._ladder.demoted(place.level, place.used_s, step_s)
        self._move(place, level, now_s, "demoted")
        place.used_s = used_s

    def _move(self, place: _Place, level: int, now_s: float, what: str) -> None:
        self._levels[place.level].leave(place.job.key)
        self._enter(place, level)
        self._changes.append(Change(key=place.job.key, what=what, at_s=now_s, level=level))

    def _enter(self, place: _Place, level: int) -> None:
        job = place.job
        place.level, place.used_s = level, 0.0
        self._levels[level].enter(job.key, tenant=job.tenant, weight=job.weight, priority=job.priority)
        if level:
            self._due.add(job.key)
