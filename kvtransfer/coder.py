"""Pieces as messages and back: blocks, through an encoding when there is one, to and from staging memory.

An encoding is computed by the CPU. On a GPU whose wire is fed from host memory, that is where a piece is encoded; a
wire that reads the GPU's own memory (RDMA, cuda_ipc) gets plain KV, for which it is fast enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtransfer import codec
from kvtransfer.codec import Encoding
from kvtransfer.device import ARRAY_TYPES, Arena, Array, Buffer
from kvtransfer.manifest import Piece
from kvtransfer.transport.base import Transport


def encodes(arena: Arena, transport: Transport) -> bool:
    """Whether what this transport sends of the arena passes through host memory."""
    return arena.device == "cpu" or not transport.device_memory


class Coder:
    """Belongs to one copy thread: it keeps memory for one plain piece, from the first encoded one on."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._plain: Buffer | None = None

    def gather(self, piece: Piece, block_ids: Sequence[int], message: Buffer, encoding: Encoding) -> None:
        """Writes the piece's message. ValueError: a block is not in the arena."""
        if not piece.encoded:
            self._arena.gather(piece, block_ids, message)
            return
        plain = self._memory(piece.bytes)
        self._arena.gather(piece, block_ids, plain)
        codec.encode(self._packed(piece, plain), encoding, message)

    def scatter(self, piece: Piece, block_ids: Sequence[int], message: Buffer, encoding: Encoding) -> None:
        """Writes the piece's message into the sequence's blocks. ValueError: a block is not in the arena."""
        if not piece.encoded:
            self._arena.scatter(piece, block_ids, message)
            return
        plain = self._memory(piece.bytes)
        codec.decode(message, encoding, self._packed(piece, plain))
        self._arena.scatter(piece, block_ids, plain)

    def _memory(self, count: int) -> Buffer:
        if self._plain is None or self._plain.size < count:
            self._plain = self._arena.staging(1 << math.ceil(math.log2(count)), on_host=True)
        return self._plain[:count]

    def _packed(self, piece: Piece, plain: Buffer) -> Array:
        layout = self._arena.layout
        shape = (piece.layers, 2, piece.tokens, piece.heads, layout.head_dim)
        return plain.view(ARRAY_TYPES[layout.dtype]).reshape(shape)
