"""Memory for weights: one stretch, in the order of their use."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from kvtransfer import huge_pages
from services.engine.native.packed import PackedMatrix


class Stretch:
    """One allocation in huge pages for many packed matrices."""

    def __init__(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype, pair: int) -> None:
        """Room for matrices of these shapes, float32 or bfloat16, or for others made of their rows."""
        self._pair = pair
        numbers = sum(math.prod(self._packed(n, k)) for n, k in shapes)
        self._memory = torch.from_numpy(huge_pages.zeros(numbers * dtype.itemsize)).view(dtype)
        self._used = 0

    def take(self, n: int, k: int) -> PackedMatrix:
        """The next matrix, zero at first. When there is no more room, in memory of its own."""
        shape = self._packed(n, k)
        begin, end = self._used, self._used + math.prod(shape)
        if end > len(self._memory):
            return PackedMatrix(torch.zeros(shape, dtype=self._memory.dtype), n)
        self._used = end
        return PackedMatrix(self._memory[begin:end].view(shape), n)

    def _packed(self, n: int, k: int) -> tuple[int, int, int]:
        return -(-n // self._pair), k, self._pair
