"""Configuration of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from services.config import WorkerConfig, setting


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """What every worker is told, and what becomes of KV that gives way."""

    swap: str = setting(
        "proactive",
        "KV of requests that give way: copied to host memory beside the steps, while the step waits (reactive), or"
        " dropped and computed again (recompute).",
        choices=("proactive", "reactive", "recompute"),
    )
    host_kv_mib: int = setting(1024, "Host memory for KV that gives way, in MiB; 0 drops it instead.", minimum=0)
