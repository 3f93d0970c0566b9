"""The generic path's runner: any model that `model.load` accepts, through transformers' own model code."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Literal

import torch

from services.engine.card import ModelCard
from services.engine.flashinfer import PagedDecode, library
from services.engine.graphs import Capture, GraphedDecode, capture_cuda
from services.engine.model import LoadedModel
from services.engine.plan import Slice, plan_step
from services.engine.pool import DeviceArray, KvPool


class GenericRunner:
    """See Runner."""

    path: Literal["generic"] = "generic"

    def __init__(
        self,
        model: LoadedModel,
        array: DeviceArray,
        *,
        capture: Capture | None = None,
        paged: ModuleType | None = None,
    ) -> None:
        """`array` is the arena, shaped as KvPool describes it. Raises EngineError when it does not fit the model.

        On a GPU, decode steps are CUDA graphs and single tokens are attended by FlashInfer where it is installed.
        `capture` and `paged` take the places of these two, for tests on a CPU.
        """
        self._model = model
        self._pool = KvPool(array, model.card)
        if model.device.type == "cuda":
            capture = capture_cuda
            # FlashInfer has no kernels for float32.
            paged = library() if model.compute_dtype is not torch.float32 else None
        self._paged = PagedDecode(paged, self._pool.block_tokens, model.device) if paged else None
        self._graphs = GraphedDecode(model, self._pool, capture, paged) if capture else None

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
        logits = self._graphs.run(plan) if self._graphs else None
        if logits is None:
            logits = self._model.forward(self._model.batch(plan, self._pool, self._paged))
        if self._model.device.type == "cuda":
            # Whoever is told of this step may send its KV at once, on another stream; and its duration is learned from.
            torch.cuda.synchronize(self._model.device)
        return logits
