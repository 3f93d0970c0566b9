"""The in-process transport: the same contract as any other, by copying between buffers on one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from kvtransfer.device import Buffer
from kvtransfer.errors import PeerLost, TransportUnavailable, TruncatedPiece
from kvtransfer.transport.base import Counters, Operation

_EAGER_BYTES: Final = 8192
"""Messages under this leave the sender before a receive is posted, as they do on a network."""

_PREFIX: Final = b"memory:"
_started: dict[bytes, MemoryTransport] = {}


@dataclass(slots=True)
class _Message:
    buffer: Buffer
    done: asyncio.Future[bool]


@dataclass(slots=True)
class _Side:
    """What has come to one side of a link and waits for its counterpart. By tag."""

    posted: dict[int, _Message] = field(default_factory=dict)
    unexpected: dict[int, deque[_Message]] = field(default_factory=dict)


@dataclass(slots=True)
class _Link:
    alive: bool = True
    sides: tuple[_Side, _Side] = field(default_factory=lambda: (_Side(), _Side()))

    def cut(self) -> None:
        self.alive = False
        for side in self.sides:
            waiting = [*side.posted.values(), *(each for queue in side.unexpected.values() for each in queue)]
            for message in waiting:
                if not message.done.done():
                    message.done.set_exception(PeerLost("the connection was aborted"))
            side.posted.clear()
            side.unexpected.clear()


class MemoryEndpoint:
    """One end of a link."""

    def __init__(self, link: _Link, side: int, counters: Counters) -> None:
        self._link = link
        self._own = link.sides[side]
        self._peer = link.sides[1 - side]
        self._counters = counters

    @property
    def alive(self) -> bool:
        """See Endpoint."""
        return self._link.alive

    @property
    def lanes(self) -> str:
        """See Endpoint."""
        return "memory"

    def send(self, buffer: Buffer, tag: int) -> Operation:
        """See Endpoint."""
        return Operation(self._send(buffer, tag), buffer)

    def receive(self, buffer: Buffer, tag: int) -> Operation:
        """See Endpoint."""
        message = _Message(buffer, asyncio.get_running_loop().create_future())
        if not self.alive:
            message.done.set_exception(PeerLost("the connection is closed"))
        elif queue := self._own.unexpected.get(tag):
            _deliver(queue.popleft(), message)
            if not queue:
                del self._own.unexpected[tag]
        else:
            self._own.posted[tag] = message
        return Operation(self._receive(message), buffer)

    async def abort(self) -> None:
        """See Endpoint."""
        if self.alive:
            self._counters.endpoints_aborted += 1
        self._link.cut()

    async def _send(self, buffer: Buffer, tag: int) -> bool:
        if not self.alive:
            raise PeerLost("the connection is closed")
        message = _Message(buffer, asyncio.get_running_loop().create_future())
        if receiver := self._peer.posted.pop(tag, None):
            _deliver(message, receiver)
        else:
            if buffer.size < _EAGER_BYTES:
                message.buffer = buffer.copy()
            self._peer.unexpected.setdefault(tag, deque()).append(message)
            if buffer.size < _EAGER_BYTES:
                message.done.add_done_callback(lambda done: done.exception())  # nobody waits for its fate
                return self._count_sent(buffer)
        await message.done
        return self._count_sent(buffer)

    def _count_sent(self, buffer: Buffer) -> bool:
        self._counters.bytes_sent += int(buffer.size)
        self._counters.messages_sent += 1
        return True

    async def _receive(self, message: _Message) -> bool:
        filled = await message.done
        if filled:
            self._counters.bytes_received += int(message.buffer.size)
            self._counters.messages_received += 1
        return filled


class MemoryTransport:
    """A transport between objects of one process."""

    name = "memory"
    device_memory = True

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._counters = Counters()
        self._connected: dict[bytes, MemoryEndpoint] = {}
        self._accepted: dict[str, MemoryEndpoint] = {}
        self._arrival = asyncio.Event()

    @property
    def address(self) -> bytes:
        """See Transport."""
        address = _PREFIX + self._incarnation.encode()
        if _started.get(address) is not self:
            raise TransportUnavailable("the memory transport is not started")
        return address

    @property
    def counters(self) -> Counters:
        """See Transport."""
        return self._counters

    async def start(self) -> None:
        """See Transport."""
        address = _PREFIX + self._incarnation.encode()
        if address in _started:
            raise TransportUnavailable(f"incarnation {self._incarnation} is started already")
        _started[address] = self

    async def connect(self, address: bytes, timeout_s: float) -> MemoryEndpoint:
        """See Transport."""
        known = self._connected.get(address)
        if known and known.alive:
            return known
        peer = _started.get(address)
        if peer is None:
            raise PeerLost(f"nobody listens at {address!r}")
        link = _Link()
        endpoint = self._connected[address] = MemoryEndpoint(link, 0, self._counters)
        peer._accept(self._incarnation, MemoryEndpoint(link, 1, peer._counters))
        return endpoint

    async def endpoint_of(self, incarnation: str, timeout_s: float) -> MemoryEndpoint:
        """See Transport."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    endpoint = self._accepted.get(incarnation)
                    if endpoint and endpoint.alive:
                        return endpoint
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError:
            raise PeerLost(f"incarnation {incarnation} has not connected") from None

    async def aclose(self) -> None:
        """See Transport."""
        address = _PREFIX + self._incarnation.encode()
        if _started.get(address) is self:
            del _started[address]
        for endpoint in (*self._connected.values(), *self._accepted.values()):
            await endpoint.abort()
        self._connected.clear()
        self._accepted.clear()

    def _accept(self, incarnation: str, endpoint: MemoryEndpoint) -> None:
        self._accepted[incarnation] = endpoint
        self._arrival.set()


def _deliver(sent: _Message, posted: _Message) -> None:
    size = int(sent.buffer.size)
    if size > posted.buffer.size:
        posted.done.set_exception(
            TruncatedPiece(f"a message of {size} bytes came for a buffer of {posted.buffer.size}")
        )
    else:
        posted.buffer[:size] = sent.buffer
        posted.done.set_result(size == posted.buffer.size)
    if not sent.done.done():
        sent.done.set_result(True)
