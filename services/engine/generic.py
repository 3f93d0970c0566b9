"""The generic path's runner: any model that `model.load` accepts, through transformers' own model code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from services.engine.card import ModelCard
from services.engine.model import LoadedModel
from services.engine.plan import Slice, plan_step
from services.engine.pool import DeviceArray, KvPool


class GenericRunner:
    """See Runner."""

    path: Literal["generic"] = "generic"

    def __init__(self, model: LoadedModel, array: DeviceArray) -> None:
        """`array` is the arena, shaped as KvPool describes it. Raises EngineError when it does not fit the model."""
        self._model = model
        self._pool = KvPool(array, model.card)

    @property
    def card(self) -> ModelCard:
        """See Runner."""
        return self._model.card

    @property
    def block_tokens(self) -> int:
        """See Runner."""
        return self._pool.block_tokens

    @property
    def weight_bytes(self) -> int:
        """See Runner."""
        return self._model.weight_bytes

    @torch.inference_mode()
    def run(self, slices: Sequence[Slice]) -> torch.Tensor:
        """See Runner.run."""
        if not slices:
            return torch.empty((0, self.card.vocab))
        plan = plan_step(slices, block_tokens=self._pool.block_tokens, blocks=self._pool.blocks, vocab=self.card.vocab)
        return self._model.forward(self._model.batch(plan, self._pool))
