"""Memory for weights: one stretch, in the order of their use."""

from __future__ import annotations

import numpy as np
import torch


class Stretch:
    """One allocation. NumPy asks the system for huge pages where an array is large, which reads a third faster."""

    def __init__(self, numbers: int, dtype: torch.dtype) -> None:
        """Room for that many numbers, float32 or bfloat16."""
        kind = np.uint16 if dtype is torch.bfloat16 else np.float32
        self._memory = torch.from_numpy(np.empty(numbers, kind)).view(dtype)
        self._used = 0

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """The next rows × columns numbers, not initialized. When there are no more, memory of their own."""
        begin, end = self._used, self._used + rows * columns
        if end > len(self._memory):
            return torch.empty((rows, columns), dtype=self._memory.dtype)
        self._used = end
        return self._memory[begin:end].view(rows, columns)
