"""What a swap is planned from, and what the plan says (see swap)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from services.schedule.policy import Next


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What there is between two steps."""

    batch: int  # at most so many run
    chosen: Sequence[str]  # the policy's choice
    upcoming: Sequence[Next]  # and who comes next, in order of ENST
    resident: Mapping[str, int]  # blocks of those whose KV is here
    host: Mapping[str, int]  # blocks of those whose KV is on the host
    moving: Collection[str]  # those whose KV is being copied: neither here nor there
    needs: Callable[[str], int]  # blocks that a request needs for the next step, beyond those it has on the device
    enst_s: Callable[[Sequence[str]], Sequence[float]]
    free: int  # blocks
    freeing: int  # blocks that copies under way will free
    filling: bool  # a copy to the device is under way
    host_free: int
    step_s: float  # predicted time of the next step


@dataclass(kw_only=True, slots=True)
class Plan:
    """What to do. First `drop`, `out` and `back`, then give each of `run` what it needs."""

    run: list[str] = field(default_factory=list)
    out: list[str] = field(default_factory=list)
    back: list[str] = field(default_factory=list)
    drop: list[str] = field(default_factory=list)
