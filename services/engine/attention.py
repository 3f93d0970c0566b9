"""Attention over the blocks: what every row of a step may see, and how it is attended.

`rows` are the new tokens of all sequences of a step, one after the other. Everything is read back from the blocks, the
new tokens included: what a token sees then does not depend on how its prompt was cut into chunks, in bf16 either.
Several tokens of one sequence are attended by torch, single tokens by the native kernel where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional

from services.engine.flashinfer import PagedDecode
from services.engine.native.kernels import Kernels
from services.engine.plan import Chunk, Indices, SinglesGroup, StepPlan, group_singles
from services.engine.pool import KvPool


@dataclass(frozen=True, slots=True)
class ChunkView:
    """What a chunk sees in layers with one window: keys (visible,) as slots, and an additive mask (tokens, visible)."""

    row: int
    tokens: int
    slots: torch.Tensor
    mask: torch.Tensor | None  # None: plain causal from position 0


@dataclass(frozen=True, slots=True)
class SinglesView:
    """What single tokens see in layers with one window: slots (n, visible), additive mask (n, 1, 1, visible)."""

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None  # None: all of it


@dataclass(frozen=True, slots=True)
class SingleTokens:
    """Singles (see plan) on the device, as the native kernel takes them."""

    rows: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor


@dataclass(slots=True)
class KvBatch:
    """One step's plan on the device, handed through the model to its attention layers.

    The views of a window are made when the first layer with that window asks, and shared by the others. `kernels`
    attend single tokens on a CPU where they can, `paged` on a GPU; torch does otherwise. `fixed` is there instead of a
    plan in a step over fixed tensors.
    """

    plan: StepPlan | None
    pool: KvPool
    dtype: torch.dtype  # of the arithmetic
    write_slots: torch.Tensor
    singles: SingleTokens | None
    kernels: Kernels | None = None
    paged: PagedDecode | None = None
    calls: list[tuple[int, int | None]] = field(default_factory=list)  # (layer, window), in the order of the calls
    fixed: Callable[[int | None], SinglesView] | None = None
    _chunks: dict[int | None, tuple[ChunkView, ...]] = field(default_factory=dict)
    _groups: dict[int | None, tuple[SinglesView, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        pool: KvPool,
        dtype: torch.dtype,
        kernels: Kernels | None = None,
        paged: PagedDecode | None = None,
    ) -> KvBatch:
        """Bring a plan to the pool's device."""
        device, singles = pool.device, None
        if plan.singles is not None:
            given = (plan.singles.rows, plan.singles.lengths, plan.singles.tables, plan.singles.starts)
            singles = SingleTokens(*(_index(each, device) for each in given))
            if paged is not None:
                paged.begin(plan.singles)
        return cls(plan, pool, dtype, _index(plan.write_slots, device), singles, kernels, paged)

    @classmethod
    def of_fixed(
        cls,
        pool: KvPool,
        write_slots: torch.Tensor,
        view: Callable[[int | None], SinglesView],
        paged: PagedDecode | None,
    ) -> KvBatch:
        """A step of single tokens alone, over tensors whose content changes from step to step."""
        batch = cls(None, pool, torch.float32, write_slots, None, paged=paged)
        batch.fixed = view
        return batch

    def chunks(self, window: int | None) -> tuple[ChunkView, ...]:
        """What the chunks see in a layer with this sliding window (in tokens, the row's own included)."""
        if window not in self._chunks:
            found = self.plan.chunks if self.plan else ()
            self._chunks[window] = tuple(self._chunk(chunk, window) for chunk in found)
        return self._chunks[window]

    def groups(self, window: int | None) -> tuple[SinglesView, ...]:
        """What single tokens see in a layer with this sliding window, for torch's attention."""
        if window not in self._groups:
            singles = self.plan.singles if self.plan else None
            found = group_singles(singles, self.pool.block_tokens) if singles else ()
            self._groups[window] = tuple(self._single(group, window) for group in found)
            if self.fixed is not None:
                self._groups[window] = (self.fixed(window),)
        return self._groups[window]

    def _chunk(self, chunk: Chunk, window: int | None) -> ChunkView:
        device = self.pool.device
        end = len(chunk.slots)
        start = end - chunk.tokens
        first = 0 if window is None else max(0, start - window + 1)
        slots = _index(chunk.slots[first:], device)
        if start == 0 and (window is None or end <= window):
            return ChunkView(chunk.row, chunk.tokens, slots, None)
        query = torch.arange(start, end, device=device)[:, None]
        key = torch.arange(first, end, device=device)[None, :]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        return ChunkView(chunk.row, chunk.tokens, slots, self._additive(hidden))

    def _single(self, group: SinglesGroup, window: int | None) -> SinglesView:
        device = self.pool.device
        lengths, slots = group.lengths, group.slots
        if window is not None and slots.shape[1] > window:
            slots, lengths = _last(slots, lengths, window)
        hidden = torch.arange(slots.shape[1], device=device)[None, :] >= _index(lengths, device)[:, None]
        mask = self._additive(hidden)[:, None, None, :] if bool(hidden.any()) else None
        return SinglesView(_index(group.rows, device), _index(slots, device), mask)

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))


def _index(values: Indices, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)


def _last(slots: Indices, lengths: Indices, window: int) -> tuple[Indices, Indices]:
    """The last `window` valid slots of each row, in order; shorter rows keep their padding."""
    offset = np.maximum(lengths - window, 0)[:, None] + np.arange(window, dtype=np.int64)[None, :]
    return np.take_along_axis(slots, np.minimum(offset, slots.shape[1] - 1), axis=1), np.minimum(lengths, window)


def attend(
    query: torch.Tensor, batch: KvBatch, layer: int, *, window: int | None, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attention of all rows of a step in one layer, whose KV is in the blocks: (rows, heads, head_dim) in and out.

    Rows of `query` may lie apart; the result is contiguous. `window`: the sliding window in tokens, the row's own
    included.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for chunk in batch.chunks(window):
        end = chunk.row + chunk.tokens
        out[chunk.row : end] = _attend_chunk(query[chunk.row : end], batch.pool, layer, chunk, scale, softcap)
    singles = batch.singles
    if batch.fixed is not None:
        (group,) = batch.groups(window)
        return _attend_paged(batch.paged, query, batch.pool, layer, group, window, scale, softcap)
    if singles is None:
        return out
    if batch.paged is not None:
        rows = query[singles.rows]
        out[singles.rows] = _attend_paged(batch.paged, rows, batch.pool, layer, None, window, scale, softcap)
    elif batch.kernels is None or softcap is not None:
        for group in batch.groups(window):
            out[group.rows] = _attend_group(query[group.rows], batch.pool, layer, group, scale, softcap)
    elif len(singles.rows) == len(query):
        _attend_natively(batch.kernels, query, batch.pool, layer, singles, out, window or 0, scale)
    else:
        own = torch.empty((len(singles.rows), *query.shape[1:]))
        _attend_natively(batch.kernels, query[singles.rows], batch.pool, layer, singles, own, window or 0, scale)
        out[singles.rows] = own
    return out


def _attend_paged(
    paged: PagedDecode | None,
    query: torch.Tensor,
    pool: KvPool,
    layer: int,
    view: SinglesView | None,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    if paged is None:
        assert view is not None
        return _attend_group(query, pool, layer, view, scale, softcap)
    return paged.attend(query, *pool.layer(layer), window=window or 0, scale=scale, softcap=softcap or 0.0)


def _attend_natively(
    kernels: Kernels,
    query: torch.Tensor,
    pool: KvPool,
    layer: int,
    singles: SingleTokens,
    out: torch.Tensor,
    window: int,
    scale: float,
) -> None:
    if query.stride()[1:] != (query.shape[2], 1):
        query = query.contiguous()
    keys, values = pool.layer(layer)
    kernels.attend(
        query, keys, values, singles.tables, singles.starts, singles.lengths, out, window=window, scale=scale
    )


def _attend_chunk(
    query: torch.Tensor, pool: KvPool, layer: int, view: ChunkView, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attention of one chunk: query (tokens, heads, head_dim) in and out."""
    tokens, heads, dim = query.shape
    keys, values = pool.read(layer, view.slots, query.dtype)  # (visible, kv_heads, head_dim)
    kv_heads, visible = keys.shape[1], keys.shape[0]
    shared = heads // kv_heads  # query heads that share a KV head; the expansion below copies nothing
    q = query.transpose(0, 1).reshape(kv_heads, shared, tokens, dim)
    k = keys.transpose(0, 1)[:, None].expand(kv_heads, shared, visible, dim)
    v = values.transpose(0, 1)[:, None].expand(kv_heads, shared, visible, dim)
    mask = view.mask
    if mask is None and softcap is not None:
        mask = torch.full((tokens, visible), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
    attended = _attend(q, k, v, mask, scale, softcap, is_causal=mask is None)
    return attended.reshape(heads, tokens, dim).transpose(0, 1)


def _attend_group(
    query: torch.Tensor, pool: KvPool, layer: int, view: SinglesView, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attention of single tokens: query (n, heads, head_dim) in and out. Heads that share a KV head are its rows."""
    n, heads, dim = query.shape
    keys, values = pool.read(layer, view.slots, query.dtype)  # (n, visible, kv_heads, head_dim)
    q = query.reshape(n, keys.shape[2], heads // keys.shape[2], dim)
    attended = _attend(q, keys.transpose(1, 2), values.transpose(1, 2), view.mask, scale, softcap, is_causal=False)
    return attended.reshape(n, heads, dim)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    *,
    is_causal: bool,
) -> torch.Tensor:
    if softcap is None:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)
