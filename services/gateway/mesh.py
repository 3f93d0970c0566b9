"""What every request needs of the process it lives in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.closing import Closing
from services.gateway.metrics import Metrics
from services.gateway.peers import SchedulerClient, WorkerClient
from services.gateway.text import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The model behind this gateway."""

    name: str
    vocab: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """What a request needs of the process it lives in. `draw_seed` gives 64 random bits."""

    model: Served
    tokenizer: Tokenizer
    scheduler: SchedulerClient
    workers: WorkerClient
    metrics: Metrics
    closing: Closing
    draw_seed: Callable[[], int]
