"""Strict priorities: a more important request always goes first, first come, first served among equals.

Nothing protects the less important from starving: `mlfq` honours priorities with a bound on waiting.
"""

from __future__ import annotations

from services.schedule.ordered import Ordered


def priority() -> Ordered:
    """Larger `Job.priority` first."""
    return Ordered("priority", lambda job, now_s: -float(job.priority))
