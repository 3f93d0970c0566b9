"""What a policy is told, what it answers, and the one interface that all of them have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

MANY: Final = 1 << 30
"""Steps: as long as nothing else happens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is known of a request when it arrives. Times on the caller's monotonic clock.

    ValueError for values that no request has.
    """

    key: str
    first_step_s: float  # predicted time of its first step: a prefill, or a decode step where its KV is handed over
    tenant: str = ""
    weight: float = 1.0  # of its tenant: twice the weight is twice the share
    priority: int = 0  # larger is more important; between requests of one tenant it changes nobody else's share
    deadline_s: float | None = None  # when it is of no use any more
    most_tokens: int = 1  # it may still generate
    service_s: float | None = None  # all the time it will need: what only an oracle knows

    def __post_init__(self) -> None:
        """Refuses what would stop a queue from being in order."""
        if not 0 <= self.first_step_s < float("inf"):
            raise ValueError(f"first_step_s: {self.first_step_s} is not a finite time ≥ 0")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight: {self.weight} is not a finite number > 0")


class Change(NamedTuple):
    """Something worth a log line, a span event or a counter happened to a request, or (key empty) to the policy."""

    key: str
    what: str  # "began" (to decode), "demoted", "promoted", "kept" (at the top, its tenant being behind), "mode"
    at_s: float
    level: int = 0  # the new one; 0 is the top
    detail: str = ""


class Next(NamedTuple):
    """A request and its estimated next scheduled time, in seconds from now."""

    key: str
    enst_s: float


class Policy(Protocol):
    """Decides whose turn it is. Single-threaded, synchronous, no clock: `now_s` never goes back.

    Between steps: `arrive` and `finish` for what came and went, then `choose`; after the step `ran` and `computed` for
    those that really ran. A request that was chosen and could not run (its KV is elsewhere) counts as waiting.
    """

    @property
    def name(self) -> str:
        """As it is chosen by."""
        ...

    def arrive(self, job: Job, now_s: float) -> None:
        """A request wants to run. ValueError when its key lives already."""
        ...

    def choose(self, batch: int, now_s: float) -> Sequence[str]:
        """The requests of the next step, best first; at most `batch`, and fewer only when fewer live."""
        ...

    def ran(self, keys: Iterable[str], seconds: float, now_s: float, *, steps: int = 1) -> None:
        """Each of the keys decoded a token in each of `steps` equal steps that ended at `now_s`, and is charged
        `seconds` in all for them. Keys that ended in the step are told too, before `finish`.
        """
        ...

    def computed(self, key: str, seconds: float, now_s: float, *, tokens: int, first: bool = False) -> None:
        """In a step that ended at `now_s` the key got a chunk of its prompt computed, or of what is computed again, and
        is charged `seconds` for it. `first`: that was the last of its prompt, and it has its first token.
        """
        ...

    def finish(self, key: str, *, completed: bool = True) -> None:
        """It ended; `completed` is false when it was cancelled or failed. KeyError when it does not live."""
        ...

    def measured(self, step_s: float) -> None:
        """A decode step takes so long now: the unit of quanta."""
        ...

    def steady_steps(self, step_s: float, now_s: float) -> int:
        """After how many steps of `step_s` of the last choice `choose` may answer differently by itself, if nobody
        arrives or ends; at least 1.
        """
        ...

    def upcoming(self, limit: int, batch: int, now_s: float) -> Sequence[Next]:
        """The first `limit` requests in order of estimated next scheduled time, those of the next step included."""
        ...

    def enst_s(self, keys: Iterable[str], batch: int, now_s: float) -> Sequence[float]:
        """Estimated next scheduled time of each key, in seconds from now. KeyError when one does not live."""
        ...

    def level(self, key: str) -> int:
        """Where it is, 0 for the top. KeyError when it does not live."""
        ...

    def levels(self) -> Sequence[int]:
        """Requests per level, the top first."""
        ...

    def take_changes(self) -> list[Change]:
        """What happened since the last call."""
        ...
