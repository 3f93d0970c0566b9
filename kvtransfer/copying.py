"""Copies between blocks and staging buffers, off the event loop and one at a time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvtransfer.device import Buffer, copy_to_host

T = TypeVar("T")


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
    """CRC-32 of a buffer."""
    return zlib.crc32(copy_to_host(buffer))
