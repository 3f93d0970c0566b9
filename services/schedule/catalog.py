"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from services.schedule.auto import Auto
from services.schedule.fcfs import fcfs
from services.schedule.mlfq import STARVATION_S, Mlfq
from services.schedule.policy import Policy
from services.schedule.priority import priority
from services.schedule.srpt import srpt_oracle

_MADE: Final[dict[str, Callable[[float, float], Policy]]] = {
    "fcfs": lambda step_s, starvation_s: fcfs(),
    "mlfq": lambda step_s, starvation_s: Mlfq(step_s=step_s, starvation_s=starvation_s),
    "mlfq-naive": lambda step_s, starvation_s: Mlfq(step_s=step_s, starvation_s=starvation_s, skip_join=False),
    "priority": lambda step_s, starvation_s: priority(),
    "srpt-oracle": lambda step_s, starvation_s: srpt_oracle(),
}
POLICIES: Final = (*_MADE, "auto")


def policy_named(name: str, *, step_s: float = 0.03, starvation_s: float = STARVATION_S, sized: bool = False) -> Policy:
    """A new one, without requests. `step_s`: a first guess of a decode step's time; `starvation_s`: α. `sized`: a job's
    first step is all that it needs, as on a prefill worker; "auto" goes by that.

    ValueError names what there is.
    """
    if name not in POLICIES:
        raise ValueError(f"policy: {name!r} is none of {', '.join(POLICIES)}")
    if name == "auto":
        return Auto(Mlfq(step_s=step_s, starvation_s=starvation_s), sized=sized)
    return _MADE[name](step_s, starvation_s)
