"""Skip-join multi-level feedback queues (FastServe: Wu et al., arXiv 2305.05920, section 4).

Levels       level i, from 0 at the top, has the quantum qᵢ = 2ⁱ·q₀, q₀ being the measured time of a decode step
             (`ladder`). A request runs one step in level 0, and in level i as many as come nearest to qᵢ.
Skip-join    a request joins at the first level whose quantum is at least its predicted first step's time. That step is
             one even if it is computed in chunks: below the top, it is not demoted for them. Afterwards a request goes
             on in level 1, like one that had its first step at the top: how long its prompt was says nothing about
             its answer. `mlfq-naive` has none of this, and everybody joins at the top.
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

Where KV is short, B is how many have room together, and `swap` bounds that time. With several tenants let n of the L
be its own: Σₖ(wₖ·n ÷ w + 1) + n − 1 take the place of L − 1 (`shares`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from services.schedule.due import Due
from services.schedule.ladder import LEVELS, Ladder, Place
from services.schedule.policy import MANY, Change, Job, Next
from services.schedule.shares import Level, Shares

STARVATION_S: Final = 1.0
"""α. The paper has 0.3 s; in simulation 1 s costs nothing in mean completion, and under overload short answers come out
a third sooner for each token: they share the top with those that starve."""


class Mlfq:
    """A policy (see `Policy`). A step costs O((batch + promotions)·log n + levels)."""

    def __init__(self, *, step_s: float = 0.03, starvation_s: float = STARVATION_S, skip_join: bool = True) -> None:
        """`step_s`: a first guess of q₀. `starvation_s`: α; infinite means that nobody is promoted."""
        if not starvation_s > 0:
            raise ValueError(f"starvation_s: {starvation_s} is not positive")
        self._ladder = Ladder(step_s)
        self._starvation_s = starvation_s
        self._skip_join = skip_join
        self._places: dict[str, Place] = {}
        self._levels = [Level() for _ in range(LEVELS)]
        self._shares = Shares()
        self._due = Due(lambda key: self._places[key].due_s)
        self._chosen: dict[str, None] = {}
        self._changes: list[tuple[str, str, float, int, str]] = []  # as they are told

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
        patience_s = self._starvation_s / 2.0**job.priority
        place = self._places[job.key] = Place(job=job, patience_s=patience_s, began=not self._skip_join)
        place.wait(now_s, self._ladder.quantum_s)
        self._shares.join(job.tenant, job.weight)
        self._enter(place, self._ladder.entry_level(job.first_step_s) if self._skip_join else 0)

    def choose(self, batch: int, now_s: float) -> Sequence[str]:
        """See Policy."""
        for key in self._due.take(now_s):
            if (place := self._places[key]).level:
                self._move(place, 0, 0.0, now_s, "promoted")
        chosen: list[str] = []
        for level in self._levels:
            if len(chosen) == batch:
                break
            chosen += level.serve(batch - len(chosen))
        self._chosen = dict.fromkeys(chosen)
        return chosen

    def ran(self, keys: Iterable[str], seconds: float, now_s: float, *, steps: int = 1) -> None:
        """See Policy."""
        for key in keys:
            place = self._charged(key, seconds, steps, now_s)
            place.began = True
            self._demote(place, seconds / steps, now_s)

    def computed(self, key: str, seconds: float, now_s: float, *, tokens: int, first: bool = False) -> None:
        """See Policy."""
        place = self._charged(key, seconds, tokens, now_s)
        if first and not place.began:
            place.began = True
            self._lower(place, 1, 0.0, now_s, "began")
        elif place.began or not place.level:
            self._demote(place, seconds, now_s)

    def _charged(self, key: str, seconds: float, tokens: int, now_s: float) -> Place:
        place = self._places[key]
        place.used_s += seconds
        place.tokens += tokens
        place.wait(now_s, self._ladder.quantum_s)
        self._shares.serve(place.job.tenant, tokens)
        return place

    def _demote(self, place: Place, step_s: float, now_s: float) -> None:
        level, used_s = self._ladder.demoted(place.level, place.used_s, step_s)
        if level != place.level:
            self._lower(place, level, used_s, now_s, "demoted")

    def finish(self, key: str, *, completed: bool = True) -> None:
        """See Policy."""
        place = self._places.pop(key)
        self._levels[place.level].remove(key)
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
        due = [key for key in self._due.soonest(limit, until_s) if key not in times]
        times |= zip(due, self.enst_s(due, batch, now_s), strict=True)
        return [Next(key, times[key]) for key in sorted(times, key=times.__getitem__)[:limit]]

    def enst_s(self, keys: Iterable[str], batch: int, now_s: float) -> Sequence[float]:
        """See Policy: min(time to promotion, its level's (`Ladder.enst_s`)). What was chosen to run now has 0."""
        of_level, places, chosen = self._ladder.enst_s(self.levels(), batch), self._places, self._chosen
        times = []
        for key in keys:
            place = places[key]
            due_s, level_s = place.due_s - now_s, of_level[place.level]
            times.append(0.0 if key in chosen or due_s < 0 else due_s if due_s < level_s else level_s)
        return times

    def level(self, key: str) -> int:
        """See Policy."""
        return self._places[key].level

    def levels(self) -> Sequence[int]:
        """See Policy."""
        return [len(level) for level in self._levels]

    def take_changes(self) -> list[Change]:
        """See Policy."""
        changes, self._changes = self._changes, []
        return [*map(Change._make, changes)]

    def _lower(self, place: Place, level: int, used_s: float, now_s: float, what: str) -> None:
        if self._shares.behind(place.job.tenant):
            level, used_s, what = 0, 0.0, "kept"
        self._move(place, level, used_s, now_s, what)

    def _move(self, place: Place, level: int, used_s: float, now_s: float, what: str) -> None:
        self._levels[place.level].remove(place.job.key)
        self._enter(place, level, used_s)
        self._changes.append((place.job.key, what, now_s, level, ""))

    def _enter(self, place: Place, level: int, used_s: float = 0.0) -> None:
        job = place.job
        place.level, place.used_s = level, used_s
        self._levels[level].enter(job.key, tenant=job.tenant, weight=job.weight, priority=job.priority)
        if level:
            self._due.add(job.key, place.due_s)
