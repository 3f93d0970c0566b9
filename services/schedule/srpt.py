"""Shortest remaining processing time, told by an oracle: the best mean completion that one server can have (Schrage,
1968), and close to it for a batch. For experiments only: nobody knows how long an answer becomes.
"""

from __future__ import annotations

from services.schedule.ordered import Ordered
from services.schedule.policy import Job


def srpt_oracle() -> Ordered:
    """Least `Job.service_s` to go first; `arrive` raises ValueError for a job without it."""
    return Ordered("srpt-oracle", _service_s, shrinks=True)


def _service_s(job: Job, now_s: float) -> float:
    if job.service_s is None:
        raise ValueError(f"service_s: {job.key!r} has none, and srpt-oracle needs it")
    return job.service_s
