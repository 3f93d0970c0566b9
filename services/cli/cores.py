"""Which thread runs on which CPU core.

A decode step is bound by memory bandwidth and is what clients wait for between two tokens: its thread gets a core to
itself first. Prefill step threads (at a lower priority) take the next cores. Every other thread and service runs on the
cores without a decode step thread, as far as the machine has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Cores = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorePlan:
    """Cores by thread; an empty tuple leaves the choice to the system."""

    decode_steps: tuple[Cores, ...]
    prefill_steps: tuple[Cores, ...]
    others: Cores


def plan_cores(available: Sequence[int], *, decode: int, prefill: int) -> CorePlan:
    """Divides `available` cores among the step threads of `decode` + `prefill` workers and everything else.

    With one core, or with more decode workers than cores can be given away, the system is left to choose: a pinned
    thread that shares its core is worse off than one that may move.
    """
    cores = tuple(sorted(set(available)))
    if len(cores) <= decode:
        return CorePlan(decode_steps=((),) * decode, prefill_steps=((),) * prefill, others=())
    others = cores[decode:]
    return CorePlan(
        decode_steps=tuple((core,) for core in cores[:decode]),
        prefill_steps=tuple((core,) for core in others[:prefill]) + (others,) * (prefill - len(others)),
        others=others,
    )


def core_list(cores: Cores) -> str:
    """The form flags and variables take: "0,1"; empty for no choice."""
    return ",".join(str(core) for core in cores)
