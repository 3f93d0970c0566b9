"""The arena, seen by torch: the same memory, no copy."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.utils.dlpack import from_dlpack

from kvtransfer.layout import DType, KvLayout
from services.engine.card import ModelCard
from services.engine.errors import EngineError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def layout_of(card: ModelCard, dtype: DType, block_tokens: int) -> KvLayout:
    """The layout of a whole model's KV in blocks of that many tokens."""
    return KvLayout(
        model=card.fingerprint,
        dtype=dtype,
        layers=card.layers,
        kv_heads=card.kv_heads,
        head_dim=card.head_dim,
        block_tokens=block_tokens,
    )


class DeviceArray(Protocol):
    """A NumPy or CuPy array, as far as the engine uses it."""

    def __dlpack__(self, *, stream: int | None = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class KvPool:
    """K and V of all blocks: (layers, 2, blocks, block_tokens, kv_heads, head_dim), float32 or uint16 holding bf16.

    A slot is `block * block_tokens + offset`. The pool owns no block and checks no ownership.
    """

    def __init__(self, array: DeviceArray, card: ModelCard) -> None:
        """View `array`. Raises EngineError when its shape is not the model's or its dtype is neither of the two."""
        tensor = from_dlpack(array)
        if tensor.dtype == torch.uint16:
            tensor = tensor.view(torch.bfloat16)
        if tensor.dtype not in _DTYPES.values():
            raise EngineError(f"KV blocks are float32, or uint16 holding bf16, not {tensor.dtype}")
        shape = tuple(tensor.shape)
        if len(shape) != 6 or (*shape[:2], *shape[4:]) != (card.layers, 2, card.kv_heads, card.head_dim):
            expected = f"({card.layers}, 2, blocks, block_tokens, {card.kv_heads}, {card.head_dim})"
            raise EngineError(f"an arena for {card.name} has the shape {expected}, not {shape}")
        self.blocks, self.block_tokens = shape[2], shape[3]
        self.device = tensor.device
        self._layers = [(tensor[layer, 0], tensor[layer, 1]) for layer in range(card.layers)]
        self._flat = tensor.view(card.layers, 2, self.blocks * self.block_tokens, card.kv_heads, card.head_dim)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each (blocks, block_tokens, kv_heads, head_dim): the arena itself."""
        return self._layers[layer]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write K and V (n, kv_heads, head_dim) of one layer to `slots` (n,), rounding to the pool's dtype."""
        for pool, new in ((self._flat[layer, 0], keys), (self._flat[layer, 1], values)):
            if new.shape[1:] != pool.shape[1:]:
                raise EngineError(f"K and V have the shape {tuple(new.shape[1:])}, the blocks {tuple(pool.shape[1:])}")
            pool.index_copy_(0, slots, new.to(pool.dtype))

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer at `slots` (…), each (…, kv_heads, head_dim), as `dtype`."""
        flat = slots.reshape(-1)
        keys, values = (
            self._flat[layer, which].index_select(0, flat).to(dtype).view(*slots.shape, *self._flat.shape[3:])
            for which in (0, 1)
        )
        return keys, values
