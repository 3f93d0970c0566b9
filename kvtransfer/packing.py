"""Where the KV of a piece lies in an arena and in its message: index arithmetic, and the two CUDA kernels that do it.

A kernel moves units: the widest of 16, 8, 4 and 2 bytes that divides a head, so that every head begins at a whole one.
Unit i of the message is unit `i % row` of token `i // row % tokens` in plane `i // row // tokens`; a plane is one
layer's K or V.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtransfer.layout import KvLayout
from kvtransfer.manifest import Piece

Table = npt.NDArray[np.int32]
"""The blocks of a piece, the one with its first token first."""

UNITS: Final = {2: "unsigned short", 4: "unsigned int", 8: "uint2", 16: "uint4"}
"""The CUDA type of a unit, by its bytes."""

SOURCE: Final = """
__device__ long long place(
    long long i, const int* table, long long tokens, long long row, long long plane, long long slots,
    long long block_tokens, long long first_token, long long stride, long long head
) {
    const long long token = first_token + i / row % tokens;
    const long long slot = table[token / block_tokens] * block_tokens + token % block_tokens;
    return ((plane + i / row / tokens) * slots + slot) * stride + head + i % row;
}

extern "C" __global__ void gather(
    const UNIT* arena, UNIT* packed, const int* table, long long count, long long tokens, long long row,
    long long plane, long long slots, long long block_tokens, long long first_token, long long stride, long long head
) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        packed[i] = arena[place(i, table, tokens, row, plane, slots, block_tokens, first_token, stride, head)];
}

extern "C" __global__ void scatter(
    UNIT* arena, const UNIT* packed, const int* table, long long count, long long tokens, long long row,
    long long plane, long long slots, long long block_tokens, long long first_token, long long stride, long long head
) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        arena[place(i, table, tokens, row, plane, slots, block_tokens, first_token, stride, head)] = packed[i];
}
"""
"""Both kernels take the arena, the message, the table, and the numbers of a Geometry in their order. UNIT stands for a
type of UNITS.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """One piece in one arena, counted in units (first of all) and tokens."""

    count: int
    """Units in the message."""
    tokens: int
    row: int
    """Units of a token in a plane of the message."""
    plane: int
    """First plane in the arena."""
    slots: int
    """Tokens that a plane of the arena has room for."""
    block_tokens: int
    first_token: int
    """Where the piece begins in its first block."""
    stride: int
    """Units of a token in a plane of the arena."""
    head: int
    """Units before the piece's first head there."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """What a kernel takes after the table."""
        return astuple(self)


def unit_bytes(layout: KvLayout) -> int:
    """Bytes of a unit."""
    return math.gcd(layout.head_bytes, 16)


def geometry(layout: KvLayout, blocks: int, piece: Piece) -> Geometry:
    """Where `piece` lies in an arena of `blocks` blocks of this layout."""
    head_units = layout.head_bytes // unit_bytes(layout)
    row = piece.heads * head_units
    return Geometry(
        count=piece.layers * 2 * piece.tokens * row,
        tokens=piece.tokens,
        row=row,
        plane=2 * (piece.layer_begin - layout.layer_begin),
        slots=blocks * layout.block_tokens,
        block_tokens=layout.block_tokens,
        first_token=piece.token_begin % layout.block_tokens,
        stride=layout.local_heads * head_units,
        head=(piece.head_begin - layout.head_begin) * head_units,
    )


def block_table(layout: KvLayout, blocks: int, piece: Piece, block_ids: Sequence[int]) -> Table:
    """The sequence's blocks that hold the piece. ValueError: one of them is not in an arena of `blocks` blocks."""
    size = layout.block_tokens
    table = np.array(block_ids[piece.token_begin // size : -(-piece.token_end // size)], np.int32)
    outside = table[(table < 0) | (table >= blocks)]
    if outside.size:
        raise ValueError(f"block {outside[0]} is not within [0, {blocks})")
    return table


def source(layout: KvLayout) -> str:
    """The kernels for this layout."""
    return SOURCE.replace("UNIT", UNITS[unit_bytes(layout)])
