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
    "auto": lambda step_s, starvation_s: Auto(Mlfq(step_s=step_s, starvation_s=starvation_s)),
}
POLICIES: Final = tuple(_MADE)


def policy_named(name: str, *, step_s: float = 0.03, starvation_s: float = STARVATION_S) -> Policy:
    """A new one, without requests. `step_s`: a first guess of a decode step's time; `starvation_s`: α.

    ValueError names what there is.
    """
    if name not in _MADE:
        raise ValueError(f"policy: {name!r} is none of {', '.join(POLICIES)}")
    return _MADE[name](step_s, starvation_s)
