"""Staging buffers: what the wire reads and writes, so that it never touches a block.

Life of a buffer here: TAKEN (acquire) → POSTED (post) → TAKEN or FREE when its operation has resolved. When nobody
waits any more, DRAINING until the operation resolves; when it never does, QUARANTINED: counted, kept referenced, not
used again. A cancel, a deadline or a dead peer never takes a shorter way.

A buffer is one loan of pooled memory: FREE ends it, and the next borrower of the same memory gets a buffer of its own.
So whoever still holds an old one can do nothing to the memory's next owner.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kvtransfer.device import Arena, Buffer
from kvtransfer.errors import TransferExpired
from kvtransfer.states import BUFFER_TRANSITIONS, BufferState, Life

_SMALLEST_BYTES: Final = 1 << 16


class StagingBuffer:
    """One loan of memory, perhaps more than was asked for. Made by a StagingPool only."""

    def __init__(self, memory: Buffer, pool: StagingPool) -> None:
        self.memory: Final = memory
        self._pool = pool
        self._life = Life("staging buffer", BufferState.TAKEN, BUFFER_TRANSITIONS)

    @property
    def state(self) -> BufferState:
        """Where it is in its life."""
        return self._life.state

    def take(self) -> None:
        """POSTED → TAKEN: its operation has resolved, and its content is wanted."""
        self._life.advance(BufferState.TAKEN)

    def post(self) -> None:
        """TAKEN → POSTED: an operation on it was started."""
        self._life.advance(BufferState.POSTED)

    def release(self) -> None:
        """→ FREE: the loan ends. Only when no operation may touch it."""
        self._life.advance(BufferState.FREE)
        self._pool.give_back(self)

    def settle(self) -> None:
        """Its operation has resolved and nobody needs its content: POSTED or DRAINING → FREE. A quarantined one
        stays so.
        """
        if self.state is not BufferState.QUARANTINED:
            self.release()

    def abandon(self) -> None:
        """POSTED → DRAINING: nobody waits for its operation any more."""
        self._life.advance(BufferState.DRAINING)

    def quarantine(self) -> None:
        """DRAINING → QUARANTINED: its operation never resolved."""
        self._life.advance(BufferState.QUARANTINED)
        self._pool.keep_forever(self)


class StagingPool:
    """Hands out staging buffers of an arena's device, or of its host. At most `limit` are out at a time; who comes
    first is served first.
    """

    def __init__(self, arena: Arena, limit: int = 64, *, on_host: bool = False) -> None:
        self._arena = arena
        self._on_host = on_host
        self._free: dict[int, list[Buffer]] = {}
        self._slots = asyncio.Semaphore(limit)
        self._out = 0
        self._quarantined: list[StagingBuffer] = []

    @property
    def out(self) -> int:
        """Buffers that are not free, quarantined ones left out."""
        return self._out

    @property
    def quarantined(self) -> int:
        """Buffers lost to operations that never resolved."""
        return len(self._quarantined)

    async def try_acquire(self, count: int) -> StagingBuffer | None:
        """A TAKEN buffer of at least `count` bytes, without waiting; None when the limit is reached or others wait."""
        if self._slots.locked():
            return None
        await self._slots.acquire()
        return self._hand_out(count)

    async def acquire(self, count: int, timeout_s: float) -> StagingBuffer:
        """A TAKEN buffer of at least `count` bytes. TransferExpired: none became free in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise TransferExpired("no staging buffer became free in time") from None
        return self._hand_out(count)

    def give_back(self, buffer: StagingBuffer) -> None:
        """Called by a buffer that became free."""
        self._free.setdefault(int(buffer.memory.size), []).append(buffer.memory)
        self._leave()

    def keep_forever(self, buffer: StagingBuffer) -> None:
        """Called by a buffer that was quarantined: its memory must outlive the operation."""
        self._quarantined.append(buffer)
        self._leave()

    def _leave(self) -> None:
        self._out -= 1
        self._slots.release()

    def _hand_out(self, count: int) -> StagingBuffer:
        # Few sizes, so that memory is found again.
        capacity = max(_SMALLEST_BYTES, 1 << max(0, count - 1).bit_length())
        free = self._free.get(capacity)
        memory = free.pop() if free else self._arena.staging(capacity, on_host=self._on_host)
        self._out += 1
        return StagingBuffer(memory, self)
