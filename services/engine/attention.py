"""The attention function that transformers' models call: it writes the new tokens' K and V to the blocks, then attends.

Shapes follow transformers on the outside: query (1, heads, rows, head_dim), key and value (1, kv_heads, rows,
head_dim), result (1, rows, heads, head_dim). `rows` are the new tokens of all sequences of a step, one after the other;
the model's other layers work on each row alone, so no padding is needed.

Everything is read back from the blocks, the new tokens included: what a token sees then does not depend on how its
prompt was cut into chunks, in bf16 either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface

from services.engine.errors import EngineError, UnsupportedArchitecture
from services.engine.plan import Chunk, Indices, Singles, StepPlan
from services.engine.pool import KvPool

IMPLEMENTATION = "diptych"
"""The name under which the function is registered; no mask function has it, so that transformers builds no mask."""

# What models pass along that changes nothing here.
_HARMLESS = frozenset(
    {
        "cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class _ChunkView:
    """What a chunk sees in layers with one window: keys (visible,) as slots, and an additive mask (tokens, visible)."""

    row: int
    tokens: int
    slots: torch.Tensor
    mask: torch.Tensor | None  # None: plain causal from position 0


@dataclass(frozen=True, slots=True)
class _SinglesView:
    """What single tokens see in layers with one window: slots (n, visible), additive mask (n, 1, 1, visible)."""

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None  # None: all of it


_View = tuple[tuple[_ChunkView, ...], tuple[_SinglesView, ...]]


@dataclass(slots=True)
class KvBatch:
    """One step's plan on the device, handed through the model to its attention layers.

    The views of a window are made when the first layer with that window asks, and shared by the others.
    """

    plan: StepPlan
    pool: KvPool
    dtype: torch.dtype  # of the arithmetic
    write_slots: torch.Tensor
    calls: list[tuple[int, int | None]] = field(default_factory=list)  # (layer, window), in the order of the calls
    _views: dict[int | None, _View] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: StepPlan, pool: KvPool, dtype: torch.dtype) -> KvBatch:
        """Bring a plan to the pool's device."""
        return cls(plan, pool, dtype, _index(plan.write_slots, pool.device))

    def view(self, window: int | None) -> _View:
        """What every row sees in a layer with this sliding window (in tokens, the row's own included)."""
        if window not in self._views:
            self._views[window] = (
                tuple(self._chunk(chunk, window) for chunk in self.plan.chunks),
                tuple(self._single(group, window) for group in self.plan.singles),
            )
        return self._views[window]

    def _chunk(self, chunk: Chunk, window: int | None) -> _ChunkView:
        device = self.pool.device
        end = len(chunk.slots)
        start = end - chunk.tokens
        first = 0 if window is None else max(0, start - window + 1)
        slots = _index(chunk.slots[first:], device)
        if start == 0 and (window is None or end <= window):
            return _ChunkView(chunk.row, chunk.tokens, slots, None)
        query = torch.arange(start, end, device=device)[:, None]
        key = torch.arange(first, end, device=device)[None, :]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        return _ChunkView(chunk.row, chunk.tokens, slots, self._additive(hidden))

    def _single(self, group: Singles, window: int | None) -> _SinglesView:
        device = self.pool.device
        lengths, slots = group.lengths, group.slots
        if window is not None and slots.shape[1] > window:
            slots, lengths = _last(slots, lengths, window)
        hidden = torch.arange(slots.shape[1], device=device)[None, :] >= _index(lengths, device)[:, None]
        mask = self._additive(hidden)[:, None, None, :] if bool(hidden.any()) else None
        return _SinglesView(_index(group.rows, device), _index(slots, device), mask)

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))


def _index(values: Indices, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)


def _last(slots: Indices, lengths: Indices, window: int) -> tuple[Indices, Indices]:
    """The last `window` valid slots of each row, in order; shorter rows keep their padding."""
    offset = np.maximum(lengths - window, 0)[:, None] + np.arange(window, dtype=np.int64)[None, :]
    return np.take_along_axis(slots, np.minimum(offset, slots.shape[1] - 1), axis=1), np.minimum(lengths, window)


class AttentionModule(Protocol):
    """What the function needs of the layer that calls it."""

    layer_idx: int


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    kv_batch: KvBatch | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attend over the blocks of `kv_batch`. Raises UnsupportedArchitecture for an argument that it cannot honour."""
    if kv_batch is None:
        raise EngineError("the model did not hand the step's batch to its attention layers")
    extra = sorted(name for name, given in others.items() if name not in _HARMLESS and given is not None)
    if extra or attention_mask is not None or is_causal is False or dropout:
        what = ", ".join(extra) or "a mask, dropout or attention to later tokens"
        raise UnsupportedArchitecture(f"its attention asks for {what}, which the paged attention does not have")
    layer = cast(AttentionModule, module).layer_idx
    kv_batch.calls.append((layer, sliding_window))
    kv_batch.pool.write(layer, kv_batch.write_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = query[0].transpose(0, 1)  # (rows, heads, head_dim)
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    chunks, singles = kv_batch.view(sliding_window)
    for chunk in chunks:
        end = chunk.row + chunk.tokens
        result[chunk.row : end] = _attend_chunk(rows[chunk.row : end], kv_batch.pool, layer, chunk, scale, softcap)
    for group in singles:
        result[group.rows] = _attend_singles(rows[group.rows], kv_batch.pool, layer, group, scale, softcap)
    return result[None], None


def _attend_chunk(
    query: torch.Tensor, pool: KvPool, layer: int, view: _ChunkView, scale: float, softcap: float | None
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


def _attend_singles(
    query: torch.Tensor, pool: KvPool, layer: int, view: _SinglesView, scale: float, softcap: float | None
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


AttentionInterface.register(IMPLEMENTATION, paged_attention)
