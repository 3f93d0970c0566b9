"""The attention function that transformers' models call: it writes the new tokens' K and V to the blocks, then attends.

Shapes follow transformers on the outside: query (1, heads, rows, head_dim), key and value (1, kv_heads, rows,
head_dim), result (1, rows, heads, head_dim). The model's other layers work on each row alone, so no padding is needed.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from transformers import AttentionInterface

from services.engine.attention import KvBatch, attend
from services.engine.errors import EngineError, UnsupportedArchitecture

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
    return attend(rows, kv_batch, layer, window=sliding_window, scale=scale, softcap=softcap)[None], None


AttentionInterface.register(IMPLEMENTATION, paged_attention)
