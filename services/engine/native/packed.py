"""Weights as the native kernels read them: those of a few outputs side by side."""

from __future__ import annotations

from typing import Final

import torch


class PackedMatrix:
    """A matrix (n, k), float32 or bfloat16, in memory as (⌈n / pair⌉, k, pair): output p · pair + i of input j is
    data[p, j, place(i)], and what is beyond n is zero.

    In bfloat16 two vectors share their places alternately: a vector of outputs is then the lower or the upper halves of
    the numbers that a register holds.
    """

    def __init__(self, data: torch.Tensor, n: int) -> None:
        """`data`: (⌈n / pair⌉, k, pair), contiguous and zero; `write` fills it."""
        self.data: Final = data
        self.shape: Final = (n, data.shape[1])
        self.pair: Final = data.shape[2]
        """Outputs side by side."""
        self.address: Final = data.data_ptr()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, without those that fill the last places."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @classmethod
    def of(cls, weight: torch.Tensor, pair: int) -> PackedMatrix:
        """A packed copy of a matrix (n, k)."""
        n, k = weight.shape
        packed = cls(torch.zeros((-(-n // pair), k, pair), dtype=weight.dtype), n)
        packed.write(0, weight)
        return packed

    def write(self, row: int, part: torch.Tensor) -> None:
        """Sets the matrix's rows from `row` on to those of `part` (rows, k), rounded to the weights' type."""
        part = part.to(self.dtype)
        first = min(-row % self.pair, len(part))  # up to a whole number of pairs, which go together
        whole = (len(part) - first) // self.pair
        for begin, end in ((0, first), (first + whole * self.pair, len(part))):
            if begin < end:
                index = torch.arange(row + begin, row + end)
                self.data[index // self.pair, :, self._places(index)] = part[begin:end]
        if whole:
            tiles = part[first : first + whole * self.pair].view(whole, *self._halves, self.shape[1])
            at = (row + first) // self.pair
            self._split(self.data[at : at + whole]).copy_(tiles.permute(0, 3, 1, 2))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows (len(ids), k) of the matrix, as float32: `ids` int64."""
        return self.data[ids // self.pair, :, self._places(ids)].float()

    def unpacked(self) -> torch.Tensor:
        """A plain copy (n, k)."""
        plain = self._split(self.data).permute(0, 2, 3, 1).reshape(-1, self.shape[1])
        return plain[: self.shape[0]]

    @property
    def _halves(self) -> tuple[int, int]:
        return 2, self.pair // 2

    def _split(self, data: torch.Tensor) -> torch.Tensor:
        """The places as (half, lane), in the order of the outputs."""
        if self.dtype is torch.float32:
            return data.view(*data.shape[:2], *self._halves)
        return data.view(*data.shape[:2], *reversed(self._halves)).transpose(2, 3)

    def _places(self, outputs: torch.Tensor) -> torch.Tensor:
        within = outputs % self.pair
        if self.dtype is torch.float32:
            return within
        lanes = self.pair // 2
        return within % lanes * 2 + within // lanes
