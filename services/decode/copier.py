"""Copies KV to host memory and back, beside the steps: one copy at a time, on a thread of its own."""

from __future__ import annotations

import time

from kvtransfer.copying import CopyThread
from kvtransfer.device import Arena, HostArena
from services.decode.messages import Copied, Copy
from services.errors import DiptychError


class Copier:
    """Between the arena and `host_blocks` blocks of the host. The thread has the cores of all but the step thread."""

    def __init__(self, arena: Arena, host_blocks: int) -> None:
        self._host = HostArena(arena, host_blocks)
        self._thread = CopyThread("swap")

    async def run(self, copy: Copy) -> Copied:
        """Makes a copy, and says how long it took or that it failed; never raises for that."""
        try:
            seconds = await self._thread.run(lambda: self._timed(copy))
        except (RuntimeError, ValueError, MemoryError) as error:
            return Copied(key=copy.key, seconds=0.0, error=DiptychError(f"its KV could not be swapped: {error}"))
        return Copied(key=copy.key, seconds=seconds)

    def close(self) -> None:
        """Ends the thread after the copies that it has."""
        self._thread.close()

    def _timed(self, copy: Copy) -> float:
        begin_s = time.perf_counter()
        if copy.out:
            self._host.save(copy.blocks, copy.host_blocks)
        else:
            self._host.restore(copy.host_blocks, copy.blocks)
        return time.perf_counter() - begin_s
