"""Leases and deadlines: remaining durations, re-based on the holder's own monotonic clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Monotonic seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A right that ends. Only durations travel between machines; the end is a time of the clock that it was granted
    on.
    """

    end_s: float

    @classmethod
    def grant(cls, limit_s: float, clock: Clock) -> Lease:
        """Starts a lease of `limit_s` seconds now."""
        return cls(end_s=clock() + limit_s)

    def remaining_s(self, clock: Clock) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.end_s - clock())

    def expired(self, clock: Clock) -> bool:
        """Says whether the end has come."""
        return clock() >= self.end_s
