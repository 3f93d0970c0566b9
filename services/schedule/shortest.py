"""Shortest first, within limits: for jobs whose whole time is known when they arrive, as a prompt's is.

Least mean completion takes shortest first (Schrage, 1968), which starves the long. Here a job of x seconds that came at
time t has the rank t + PATIENCE·x for good. So it passes those that came before it only as far as they are longer: it
may have arrived PATIENCE·(difference) later. Nobody is passed by what comes later than PATIENCE·x after it; equal jobs
go first come, first served; and no two jobs take turns, which would make both end as late as the later of them.
"""

from __future__ import annotations

from typing import Final

from services.schedule.ordered import Ordered

PATIENCE: Final = 8.0
"""How many times its own length a job may be passed. A prompt of 5 s waits for those of 0.3 s that come within 40 s."""


def shortest() -> Ordered:
    """By `Job.first_step_s`, which is all that a job needs here."""
    return Ordered("shortest", lambda job, now_s: now_s + PATIENCE * job.first_step_s)
