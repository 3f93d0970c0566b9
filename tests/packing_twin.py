"""What the CUDA kernels of kvtransfer.packing do, in NumPy; arrays are one-dimensional, of units."""

from __future__ import annotations

import numpy as np


def place(i, table, tokens, row, plane, slots, block_tokens, first_token, stride, head):
    """Where units `i` of the message are in the arena."""
    token = first_token + i // row % tokens
    slot = table[token // block_tokens].astype(np.int64) * block_tokens + token % block_tokens
    return ((plane + i // row // tokens) * slots + slot) * stride + head + i % row


def gather(arena, packed, table, count, *numbers: int) -> None:
    i = np.arange(count)
    packed[i] = arena[place(i, table, *numbers)]


def scatter(arena, packed, table, count, *numbers: int) -> None:
    i = np.arange(count)
    arena[place(i, table, *numbers)] = packed[i]
