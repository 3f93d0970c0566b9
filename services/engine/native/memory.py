"""Memory for weights: one stretch, in the order of their use."""

from __future__ import annotations

import torch

from kvtransfer import huge_pages


class Stretch:
    """One allocation in huge pages."""

    def __init__(self, numbers: int, dtype: torch.dtype) -> None:
        """Room for that many numbers, float32 or bfloat16."""
        self._memory = torch.from_numpy(huge_pages.zeros(numbers * dtype.itemsize)).view(dtype)
        self._used = 0

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """The next rows × columns numbers, zero at first. When there are no more, memory of their own."""
        begin, end = self._used, self._used + rows * columns
        if end > len(self._memory):
            return torch.zeros((rows, columns), dtype=self._memory.dtype)
        self._used = end
        return self._memory[begin:end].view(rows, columns)
