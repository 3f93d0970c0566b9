"""The fault table of KV transfers: its rows, and what must be true afterwards. Pure.

A row is one transfer between two processes in which one of them, the victim, meets a fault at a known phase. Then:
whoever lives lives on; within the row's deadline it holds nothing any more for that transfer (blocks, offers, staging
buffers, operations); a pull never calls wrong KV good; blocks that a failed pull gave back belong to their next owner
alone; and a whole transfer with a fresh or recovered peer is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Final

LIMIT_S: Final = 4.0
"""Lease of each offer and limit of each pull."""

STOP_S: Final = 20.0
"""How long a stopped process stays stopped: longer than everybody else's deadline."""

_NOTICE_S: Final = 4.0
"""A death or a broken connection is seen at once; what is on the wire then drains or is aborted."""

_SILENCE_S: Final = LIMIT_S + 2.0 + 5.0 + 2.0
"""A peer that says nothing: the limit, the time to tell it, the time to drain before the abort, and some to spare."""


class Side(Enum):
    """Who meets the fault."""

    SENDER = "sender"
    RECEIVER = "receiver"


class Kind(Enum):
    """What happens to it."""

    KILLED = "SIGKILL"
    STOPPED = "SIGSTOP"
    CUT = "link-cut"
    """All its data connections break; the control stream lives."""
    SILENT = "lost-acknowledgement"
    """What it says on the control stream from that phase on is lost, that phase's word and the end included."""
    RESTARTED = "restarted"
    """Killed, and another life comes up at the same address."""
    REDIS = "redis-away"
    """The worker's Redis ends, and an empty one comes back."""


class Phase(Enum):
    """When."""

    OFFERED = "offered"
    """Promised; the receiver has not opened."""
    POSTED = "posted"
    """Receives are posted; no KV moves."""
    MID_PIECE = "mid-piece"
    """Milliseconds into the second piece."""
    LAST_PIECE = "last-piece"
    """Milliseconds into the last piece."""
    ACKNOWLEDGED = "acknowledged"
    """The receiver has said that it has everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row."""

    victim: Side
    kind: Kind
    phase: Phase

    @property
    def name(self) -> str:
        """For example sender/SIGKILL/mid-piece."""
        return f"{self.victim.value}/{self.kind.value}/{self.phase.value}"

    @property
    def survivor(self) -> Side:
        """The other one."""
        return Side.RECEIVER if self.victim is Side.SENDER else Side.SENDER

    @property
    def victim_lives(self) -> bool:
        """Whether the victim must recover, too."""
        return self.kind not in (Kind.KILLED, Kind.RESTARTED)

    def deadline_s(self, side: Side) -> float:
        """Within this of the fault `side` holds nothing any more; of the end of the stop, for a stopped victim."""
        if self.kind in (Kind.STOPPED, Kind.SILENT):
            return _SILENCE_S
        if side is Side.SENDER and self.phase is Phase.OFFERED:
            return LIMIT_S + _NOTICE_S  # nobody comes for the offer: its lease ends it
        return _NOTICE_S

    def pull_may_be(self, *, good: bool) -> bool:
        """Whether a pull with this outcome is believable, if its process lives. What was lost cannot have arrived, and
        what was acknowledged has.
        """
        if self.phase is Phase.ACKNOWLEDGED or self._breaks_nothing():
            return good
        if self.phase is Phase.LAST_PIECE and self.kind is not Kind.SILENT:
            return True
        return not good

    def _breaks_nothing(self) -> bool:
        """There is no connection yet; or only the receiver's acknowledgement is left to be lost."""
        if self.kind is Kind.CUT:
            return self.phase is Phase.OFFERED
        late = self.phase in (Phase.MID_PIECE, Phase.LAST_PIECE)
        return self.kind is Kind.SILENT and self.victim is Side.RECEIVER and late


REDIS_PHASES: Final = {Side.SENDER: Phase.OFFERED, Side.RECEIVER: Phase.ACKNOWLEDGED}
"""The data plane knows no Redis: two rows with whole workers, while prefill computes and while decode decodes."""

ROWS: Final = tuple(
    Row(victim=victim, kind=kind, phase=phase)
    for kind in Kind
    for victim in Side
    for phase in Phase
    if kind is not Kind.REDIS or phase is REDIS_PHASES[victim]
)


def rows_like(pattern: str) -> tuple[Row, ...]:
    """Rows whose name matches a glob, or one of several with commas between them."""
    return tuple(row for row in ROWS if any(fnmatchcase(row.name, each) for each in pattern.split(",")))
