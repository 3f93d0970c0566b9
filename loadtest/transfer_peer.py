"""What the two processes of `loadtest transfer` agree on: layouts, and the lines that one says to the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Final

from kvtransfer import KvLayout
from kvtransfer.manifest import Piece, plan_pieces

BLOCK_TOKENS: Final = 16
CHUNK_TOKENS: Final = 256
"""Of the prefill, real or played."""

GRPC_METHOD: Final = "/diptych.loadtest.Bytes/Get"
"""Unary request: sizes as JSON; answer: one message of bytes for each."""

SHAPES: Final[Mapping[str, KvLayout]] = {
    "smollm2": KvLayout(model="smollm2", dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=BLOCK_TOKENS),
    "8b": KvLayout(model="8b", dtype="bf16", layers=32, kv_heads=8, head_dim=128, block_tokens=BLOCK_TOKENS),
}
"""KV without a model behind it."""

ENGINE: Final = "engine"
"""The place where a real prefill writes its KV."""

Line = dict[str, str | int | float | bool | list[int] | dict[str, int]]


def pieces_of(place: str, tokens: int) -> tuple[Piece, ...]:
    """The pieces in which so many tokens of a shape travel."""
    return plan_pieces(SHAPES[place], SHAPES[place], tokens)


class Lines:
    """Lines of JSON in both directions. What else the other process writes (UCX logs) is passed over."""

    def __init__(self, reader: asyncio.StreamReader, write: Callable[[bytes], object]) -> None:
        self._reader, self._write = reader, write

    def say(self, line: Line) -> None:
        """Sends one."""
        self._write(json.dumps(line).encode() + b"\n")

    async def hear(self) -> Line | None:
        """The next one; None when the other side is gone."""
        while line := await self._reader.readline():
            if line.startswith(b"{"):
                heard: Line = json.loads(line)
                return heard
        return None
