"""Attention of single tokens on a GPU by FlashInfer's paged kernels, where that library is installed.

Its block tables are ours: keys and values (blocks, block_tokens, kv_heads, head_dim), blocks in any order. It wants a
plan for each step, made on the host; inside a captured graph the plan's tensors are fixed and are filled anew.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, cast

import numpy as np
import torch

from services.engine.plan import Singles

_WORKSPACE_BYTES = 128 << 20


class _Wrapper(Protocol):
    """What is used of flashinfer.BatchDecodeWithPagedKVCacheWrapper."""

    plan: Callable[..., None]
    run: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What differs between the layers of a model."""

    window: int
    scale: float
    softcap: float
    heads: int


def library() -> ModuleType | None:
    """FlashInfer, where it is installed."""
    return importlib.import_module("flashinfer") if importlib.util.find_spec("flashinfer") else None


class PagedDecode:
    """One step's single tokens. `begin` a step, then `attend` in each layer."""

    def __init__(
        self, library: ModuleType, block_tokens: int, device: torch.device, *, batch: int = 0, blocks: int = 0
    ) -> None:
        """`batch` and `blocks`: for a graph of exactly that many rows and at most that many blocks in all."""
        self._library = library
        self._block_tokens, self._device = block_tokens, device
        self._batch, self._blocks = batch, blocks
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Kind, tuple[_Wrapper, torch.Tensor, torch.Tensor]] = {}
        self._planned: set[_Kind] = set()
        self._step: Singles | None = None

    def begin(self, singles: Singles) -> None:
        """Takes a step's block tables. Plans what the layers of earlier steps have asked for."""
        self._step = singles
        self._planned.clear()
        for kind, (_, query, keys) in tuple(self._wrappers.items()):
            self._plan(kind, query, keys)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        window: int,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        """Attention of query (rows, heads, head_dim), of one token for each sequence; the same shape out."""
        kind = _Kind(window, scale, softcap, query.shape[1])
        if kind not in self._planned:
            self._plan(kind, query, keys)
        return self._wrappers[kind][0].run(query.contiguous(), (keys, values))

    def _plan(self, kind: _Kind, query: torch.Tensor, keys: torch.Tensor) -> None:
        step = self._step
        assert step is not None, "begin comes first"
        if kind not in self._wrappers:
            self._wrappers[kind] = (self._make(), query, keys)
        ends = np.append(step.starts, len(step.tables)).astype(np.int32)
        last = ((step.lengths - 1) % self._block_tokens + 1).astype(np.int32)
        self._wrappers[kind][0].plan(
            *(torch.from_numpy(each).to(self._device) for each in (ends, step.tables.astype(np.int32), last)),
            kind.heads,
            keys.shape[2],
            keys.shape[3],
            self._block_tokens,
            window_left=kind.window - 1,  # -1: no window
            logits_soft_cap=kind.softcap,
            sm_scale=kind.scale,
            q_data_type=query.dtype,
            kv_data_type=keys.dtype,
        )
        self._planned.add(kind)

    def _make(self) -> _Wrapper:
        make = self._library.BatchDecodeWithPagedKVCacheWrapper
        if not self._batch:
            return cast(_Wrapper, make(self._workspace, "NHD"))

        def fixed(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._device)

        return cast(
            _Wrapper,
            make(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                paged_kv_indptr_buffer=fixed(self._batch + 1),
                paged_kv_indices_buffer=fixed(self._blocks),
                paged_kv_last_page_len_buffer=fixed(self._batch),
            ),
        )
