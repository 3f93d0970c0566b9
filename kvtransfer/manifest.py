"""What a transfer moves: a fixed grid of pieces that both sides compute for themselves.

What moves is what the two shards have in common. A piece is (layer group) × {K, V} × (token range) × (head range), on
the wire in C order as (layers, 2, tokens, heads, head_dim). The grid depends only on the two layouts and the token
range, so no list of pieces ever travels. An encoding (see codec) changes the length of their messages alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvtransfer.codec import Encoding, wire_bytes
from kvtransfer.errors import LayoutMismatch
from kvtransfer.layout import ELEMENT_BYTES, KvLayout, overlap

PIECE_TOKENS: Final = 128
"""Token ranges are aligned at multiples of the least common multiple of the block sizes that is at least this."""

PIECE_BYTES: Final = 4 << 20
"""A token range is cut into as many layer groups as keep a piece under this. Larger messages disturb a decode step
more.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One message: tokens [token_begin, token_end) of layers [layer_begin, layer_end) and KV heads [head_begin,
    head_end), counted over the whole model. `bytes` are those of its KV, `wire_bytes` those of its message.
    """

    index: int
    token_begin: int
    token_end: int
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int
    bytes: int
    wire_bytes: int

    @property
    def encoded(self) -> bool:
        """Whether the message is not the KV as it is. A piece that would gain nothing travels plain."""
        return self.wire_bytes < self.bytes

    @property
    def tokens(self) -> int:
        """Length of the token range."""
        return self.token_end - self.token_begin

    @property
    def layers(self) -> int:
        """Size of the layer group."""
        return self.layer_end - self.layer_begin

    @property
    def heads(self) -> int:
        """Length of the head range."""
        return self.head_end - self.head_begin


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything that one transfer moves. Tokens [0, skip_tokens) are at the receiver already."""

    tokens: int
    skip_tokens: int
    encoding: Encoding
    pieces: tuple[Piece, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes of all messages."""
        return sum(piece.wire_bytes for piece in self.pieces)


def plan_pieces(
    sender: KvLayout, receiver: KvLayout, tokens: int, skip_tokens: int = 0, encoding: Encoding = "plain"
) -> tuple[Piece, ...]:
    """Cuts tokens [skip_tokens, tokens) of what both shards hold into pieces, by token range first, then by layer
    group.

    Both sides get the same answer. LayoutMismatch: the layouts do not fit together, or share nothing. ValueError:
    skip_tokens is negative or beyond tokens.
    """
    area = overlap(sender, receiver)
    if not 0 <= skip_tokens <= tokens:
        raise ValueError(f"skip_tokens must be within [0, {tokens}], is {skip_tokens}")
    common = math.lcm(sender.block_tokens, receiver.block_tokens)
    piece_tokens = common * max(1, math.ceil(PIECE_TOKENS / common))
    layer_bytes = 2 * area.heads * sender.head_bytes
    groups = min(area.layers, math.ceil(piece_tokens * area.layers * layer_bytes / PIECE_BYTES))
    group_layers = math.ceil(area.layers / groups)
    pieces: list[Piece] = []
    begin = skip_tokens
    while begin < tokens:
        end = min(tokens, (begin // piece_tokens + 1) * piece_tokens)
        for first in range(area.layer_begin, area.layer_end, group_layers):
            last = min(first + group_layers, area.layer_end)
            shape = (last - first, 2, end - begin, area.heads, sender.head_dim)
            pieces.append(
                Piece(
                    index=len(pieces),
                    token_begin=begin,
                    token_end=end,
                    layer_begin=first,
                    layer_end=last,
                    head_begin=area.head_begin,
                    head_end=area.head_end,
                    bytes=(end - begin) * (last - first) * layer_bytes,
                    wire_bytes=wire_bytes(encoding, shape, ELEMENT_BYTES[sender.dtype]),
                )
            )
        begin = end
    return tuple(pieces)


def plan(
    sender: KvLayout, receiver: KvLayout, tokens: int, skip_tokens: int = 0, encoding: Encoding = "plain"
) -> Manifest:
    """Plans the pieces and keeps them together. Errors as in plan_pieces."""
    pieces = plan_pieces(sender, receiver, tokens, skip_tokens, encoding)
    return Manifest(tokens=tokens, skip_tokens=skip_tokens, encoding=encoding, pieces=pieces)


def require_same_manifest(own: Manifest, *, tokens: int, pieces: int, total_bytes: int) -> None:
    """Raises LayoutMismatch unless the peer's counts are those of our own plan."""
    for name, ours, theirs in (
        ("tokens", own.tokens, tokens),
        ("pieces", len(own.pieces), pieces),
        ("bytes", own.wire_bytes, total_bytes),
    ):
        if ours != theirs:
            raise LayoutMismatch(f"the manifests differ in {name}: {ours} here, {theirs} at the sender")
