"""One step of one rank: slices of sequences in, logits out."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from services.engine.card import ModelCard
from services.engine.errors import UnsupportedArchitecture
from services.engine.plan import Slice
from services.engine.pool import DeviceArray

__all__ = ["Dtype", "Path", "Runner", "Slice", "open_runner"]

log = logging.getLogger(__name__)

Dtype = Literal["fp32", "bf16"]
Path = Literal["fast", "generic"]

_FAST = "services.engine.fast"


class Runner(Protocol):
    """Computes steps over the blocks of one arena. Not thread-safe: it belongs to the step thread."""

    @property
    def path(self) -> Path:
        """Which implementation this is."""

    @property
    def card(self) -> ModelCard:
        """The model."""

    @property
    def block_tokens(self) -> int:
        """Tokens in one block of the arena."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads."""

    def run(self, slices: Sequence[Slice]) -> torch.Tensor:
        """Compute the slices' tokens, prompt chunks and single tokens together, and write their KV to the blocks.

        Returns float32 logits (logit rows of all slices, vocab), in the order given; see Slice.logit_count. A sequence
        appears at most once in a step. Raises InvalidSlice before anything is written; EngineError otherwise.
        """


def open_runner(card: ModelCard, *, dtype: Dtype, device: str, array: DeviceArray, path: Path | None = None) -> Runner:
    """Load the model that `card` describes, over the arena `array` (shaped as KvPool describes it).

    `path` None takes the fast one where it serves the model. Raises UnsupportedArchitecture, ModelNotFound, EngineError
    when the arena does not fit; UnsupportedArchitecture also when `path` is "fast" and that one does not serve it.
    """
    if path != "generic" and importlib.util.find_spec(_FAST):
        torch.set_num_threads(1)
        fast: Runner | None = importlib.import_module(_FAST).open_fast(card, dtype=dtype, device=device, array=array)
        if fast is not None:
            return fast
    if path == "fast":
        raise UnsupportedArchitecture(f"{card.architecture} on {device} is not served by the fast path")
    from services.engine.generic import GenericRunner  # transformers takes seconds to import
    from services.engine.model import load

    return GenericRunner(load(card, dtype=dtype, device=device), array)
