"""One step of one rank: slices of sequences in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from services.engine.attention import KvBatch
from services.engine.card import ModelCard
from services.engine.model import LoadedModel
from services.engine.plan import Slice, plan_step
from services.engine.pool import DeviceArray, KvPool

__all__ = ["GenericRunner", "Runner", "Slice"]


class Runner(Protocol):
    """Computes steps over the blocks of one arena. Not thread-safe: it belongs to the step thread."""

    @property
    def card(self) -> ModelCard:
        """The model."""

    @property
    def block_tokens(self) -> int:
        """Tokens in one block of the arena."""

    def run(self, slices: Sequence[Slice]) -> torch.Tensor:
        """Compute the slices' tokens, prompt chunks and single tokens together, and write their KV to the blocks.

        Returns float32 logits (logit rows of all slices, vocab), in the order given; see Slice.logit_count. A sequence
        appears at most once in a step. Raises InvalidSlice before anything is written; EngineError otherwise.
        """


class GenericRunner:
    """Runs any model that `model.load` accepts, through transformers' own model code."""

    def __init__(self, model: LoadedModel, array: DeviceArray) -> None:
        """`array` is the arena, shaped as KvPool describes it. Raises EngineError when it does not fit the model."""
        self._model = model
        self._pool = KvPool(array, model.card)

    @property
    def card(self) -> ModelCard:
        """The model."""
        return self._model.card

    @property
    def block_tokens(self) -> int:
        """Tokens in one block of the arena."""
        return self._pool.block_tokens

    @torch.inference_mode()
    def run(self, slices: Sequence[Slice]) -> torch.Tensor:
        """See Runner.run."""
        if not slices:
            return torch.empty((0, self.card.vocab))
        plan = plan_step(slices, block_tokens=self._pool.block_tokens, blocks=self._pool.blocks, vocab=self.card.vocab)
        return self._model.forward(KvBatch.of(plan, self._pool, self._model.compute_dtype))
