"""First come, first served: what an Orca-like engine does, and what every other policy is compared with."""

from __future__ import annotations

from services.schedule.ordered import Ordered


def fcfs() -> Ordered:
    """Runs each request to its end; whoever came later fills what is free of the batch."""
    return Ordered("fcfs", lambda job, now_s: 0.0)
