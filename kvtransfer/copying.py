"""Copies between blocks and staging buffers, off the event loop and one at a time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np

from kvtransfer.device import Buffer, copy_to_host

T = TypeVar("T")

_ROW_WORDS: Final = 509
_ROW_BYTES: Final = 8 * _ROW_WORDS


class CopyThread:
    """One thread. NumPy and CuPy release the GIL while they copy, so the event loop and a step thread go on."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, copy: Callable[[], T]) -> T:
        """Runs one copy and waits for its end. When the waiting task is cancelled, still waits for the end before it
        raises: afterwards nothing reads or writes the memory on this copy's behalf.
        """
        work = asyncio.get_running_loop().run_in_executor(self._pool, copy)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            while not work.done():  # milliseconds: a copy cannot hang
                try:
                    await asyncio.wait([work])
                except asyncio.CancelledError:
                    continue
            raise

    def close(self) -> None:
        """Ends the thread after the copies that it has."""
        self._pool.shutdown(wait=True)


def checksum(buffer: Buffer) -> int:
    """32 bits that tell a buffer from a damaged, stale or half-written one, in one reading of it at memory's speed.

    The bytes as rows of 509 little words: CRC-32 over what is left after the last row and the sums of all columns. It
    sees every change of a single word. Several pass only where they cancel each other in their columns (or with the
    odds of any 32 bits), and content in the wrong place only where that is whole rows away: never so between blocks,
    heads, planes or pages, for 509 is a prime.
    """
    whole = buffer.size - buffer.size % _ROW_BYTES
    rows = buffer[:whole].view(np.uint64).reshape(-1, _ROW_WORDS)
    crc32 = zlib.crc32(copy_to_host(buffer[whole:]))
    return zlib.crc32(copy_to_host(rows.sum(axis=0)), crc32)  # sums wrap around
