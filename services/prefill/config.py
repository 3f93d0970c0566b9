"""Configuration of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from services.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """What every worker is told; nothing else."""
