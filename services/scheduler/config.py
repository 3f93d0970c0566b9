"""What the scheduler is told."""

from __future__ import annotations

import dataclasses

from services.config import ServiceConfig, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig(ServiceConfig):
    """Flags and variables of the scheduler."""

    port: int = setting(50052, "gRPC port; 0 takes a free one.", minimum=0, maximum=65535)
    queue_limit: int = setting(1024, "Most requests waiting in the line of a model; more are refused.", minimum=0)
    local_prefill: str = setting(
        "auto",
        "Whether a decode worker computes a prompt when no prefill worker can: auto (it does) or never.",
        choices=("auto", "never"),
    )
    hand_off_limit_s: float = setting(
        120.0, "Longest time for a prefill and its hand-off, in seconds.", minimum=0.1, maximum=3600
    )
