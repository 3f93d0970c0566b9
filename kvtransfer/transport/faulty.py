"""A transport that delays, reorders, throttles and cuts what it sends over another one; and control streams that lose
what is said on them. For tests, for demonstrations, and for measurements on links that are not there.

Life of a message here: `send` books its place on the link and its delay, by a seeded choice → so much
before it would arrive that it does then, the message goes out over the transport below, which is faster by far → the
time has come and the message is through: the operation resolves. Waiting messages of a connection fail when it breaks.
A cut breaks the connection below on both sides, in the midst of KV: what probes say is not counted. As on a real link a
receive that fails may have been written to: half of it is overwritten with noise, so that nobody relies on it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final

from kvtransfer.device import Buffer, copy_from_host
from kvtransfer.errors import PeerLost
from kvtransfer.lease import Clock
from kvtransfer.messages import Acknowledge, Control, Message
from kvtransfer.token_bucket import TokenBucket
from kvtransfer.transport.base import PROBE_TAGS, Counters, Endpoint, Operation, Transport
from kvtransfer.transport.fault import Fault

_LOOK_S: Final = 0.05
"""How often a waiting message looks whether its connection still lives."""

_MEASURED_BYTES: Final = 1 << 16
_LEARNING: Final = 0.25
_LATE_LIMIT_S: Final = 0.004
"""The transport below takes milliseconds, and timers are late by one: messages from this size on teach how much earlier
to begin.
"""

_CLOSING_S: Final = 5.0


class _Link:
    """What the connections of one transport share: the bucket, the choices, the cuts still to come."""

    def __init__(self, fault: Fault, clock: Clock) -> None:
        self.clock: Final = clock
        self.operations: Final[set[Operation]] = set()
        self._fault = fault
        self._bucket = TokenBucket(fault.bytes_per_s) if fault.bytes_per_s else None
        self._random = random.Random(fault.seed)
        self._cut_after_bytes = fault.cut_after_bytes
        self._cut_in_bytes = fault.cut_in_bytes
        self._lead_s = 0.0

    def arrival_s(self, count: int) -> float:
        """When a message that is sent now arrives."""
        now_s = self.clock()
        through_s = self._bucket.reserve(count, now_s) if self._bucket else now_s
        return through_s + self._fault.delay_s + self._random.uniform(0.0, self._fault.reorder_s)

    def cut_at(self, carried: int, count: int) -> int | None:
        """How many bytes of the next message, after `carried` ones of its connection, get through before the cut that
        falls into it; None: it is not cut.
        """
        if self._cut_after_bytes is not None and carried + count > self._cut_after_bytes:
            cut, self._cut_after_bytes = self._cut_after_bytes - carried, None
            return max(0, cut)
        if self._cut_in_bytes is not None and count > self._cut_in_bytes:
            cut, self._cut_in_bytes = self._cut_in_bytes, None
            return cut
        return None

    def link_s(self, count: int) -> float:
        """Time that so many bytes take on the link."""
        return count / self._bucket.bytes_per_s if self._bucket else 0.0

    def lead_s(self, count: int) -> float:
        """How long before its arrival a message must be given to the transport below. Nothing before its time on a
        link that is as fast as it is.
        """
        return min(self._lead_s, self.link_s(count))

    def arrived(self, count: int, late_s: float) -> None:
        """A message arrived so much after its time, or before it. The next ones are given earlier, or later."""
        if count >= _MEASURED_BYTES:
            # A message that waited for its receive says nothing, hence the limit.
            self._lead_s = max(0.0, self._lead_s + _LEARNING * max(-_LATE_LIMIT_S, min(_LATE_LIMIT_S, late_s)))

    def noise(self, count: int) -> bytes:
        """Random bytes."""
        return self._random.randbytes(count)

    def track(self, operation: Operation) -> Operation:
        """Keeps an operation until it is resolved."""
        self.operations.add(operation)
        operation.on_resolved(lambda: self.operations.discard(operation))
        return operation


class FaultyEndpoint:
    """A connection over which messages go wrong. Made by FaultyTransport only."""

    def __init__(self, inner: Endpoint, link: _Link) -> None:
        self._inner = inner
        self._link = link
        self._carried = 0
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """See Endpoint."""
        return self._inner.alive and not self._ended.done()

    @property
    def lanes(self) -> str:
        """See Endpoint."""
        return self._inner.lanes

    def send(self, buffer: Buffer, tag: int) -> Operation:
        """See Endpoint."""
        count = int(buffer.size)
        cut = None
        if not tag & PROBE_TAGS:
            cut = self._link.cut_at(self._carried, count)
            self._carried += count
        arrival_s = self._link.arrival_s(count)
        if cut is None:
            return self._link.track(Operation(self._send(buffer, tag, arrival_s), buffer))
        return self._link.track(Operation(self._cut_off(arrival_s - self._link.link_s(count - cut)), buffer))

    def receive(self, buffer: Buffer, tag: int) -> Operation:
        """See Endpoint."""
        return self._link.track(Operation(self._receive(self._inner.receive(buffer, tag), buffer), buffer))

    async def abort(self) -> None:
        """See Endpoint."""
        if not self._ended.done():
            self._ended.set_result(None)
        await self._inner.abort()

    async def _send(self, buffer: Buffer, tag: int, arrival_s: float) -> bool:
        count = int(buffer.size)
        await self._wait_until(arrival_s - self._link.lead_s(count))
        below = self._inner.send(buffer, tag)
        await asyncio.wait([below.task])
        sent = below.task.result()
        self._link.arrived(count, self._link.clock() - arrival_s)
        await self._wait_until(arrival_s)
        self._raise_if_ended()
        return sent

    async def _cut_off(self, at_s: float) -> bool:
        await self._wait_until(at_s)
        await self.abort()
        raise PeerLost("the connection was cut")

    async def _receive(self, below: Operation, buffer: Buffer) -> bool:
        await asyncio.wait([below.task])
        if isinstance(below.error, PeerLost):
            half = int(buffer.size) // 2
            copy_from_host(self._link.noise(half), buffer[:half])
        filled = below.task.result()
        self._raise_if_ended()
        return filled

    def _raise_if_ended(self) -> None:
        """What was not through when the connection broke here is lost, even if the slow end of the one below let it
        pass.
        """
        if self._ended.done():
            raise PeerLost("the connection is closed")

    async def _wait_until(self, time_s: float) -> None:
        """PeerLost: the connection broke before."""
        while (left_s := time_s - self._link.clock()) > 0:
            if not self._inner.alive:
                raise PeerLost("the connection to the peer is lost")
            self._raise_if_ended()
            await asyncio.wait([self._ended], timeout=min(left_s, _LOOK_S))


class FaultyTransport:
    """Wraps a transport; peers see the one below, and may have it without a wrapper. `counters` are those of the one
    below.
    """

    def __init__(self, inner: Transport, fault: Fault, *, clock: Clock = time.monotonic) -> None:
        self._inner = inner
        self._link = _Link(fault, clock)
        self._endpoints: dict[Endpoint, FaultyEndpoint] = {}

    @property
    def name(self) -> str:
        """See Transport: that of the one below."""
        return self._inner.name

    @property
    def address(self) -> bytes:
        """See Transport."""
        return self._inner.address

    @property
    def counters(self) -> Counters:
        """See Transport."""
        return self._inner.counters

    @property
    def device_memory(self) -> bool:
        """See Transport."""
        return self._inner.device_memory

    @property
    def pending(self) -> int:
        """Operations that are not resolved."""
        return len(self._link.operations)

    async def start(self) -> None:
        """See Transport."""
        await self._inner.start()

    async def connect(self, address: bytes, timeout_s: float) -> FaultyEndpoint:
        """See Transport."""
        return self._over(await self._inner.connect(address, timeout_s))

    async def endpoint_of(self, incarnation: str, timeout_s: float) -> FaultyEndpoint:
        """See Transport."""
        return self._over(await self._inner.endpoint_of(incarnation, timeout_s))

    async def cut(self) -> None:
        """Cuts every connection that was asked for here, now. New ones can be made."""
        await asyncio.gather(*(endpoint.abort() for endpoint in self._endpoints.values()))

    async def aclose(self) -> None:
        """See Transport."""
        try:
            await self.cut()
            if self._link.operations:
                await asyncio.wait([each.task for each in self._link.operations], timeout=_CLOSING_S)
        finally:
            await self._inner.aclose()

    def _over(self, inner: Endpoint) -> FaultyEndpoint:
        """The wrapper of an endpoint, always the same one."""
        for dead in [each for each in self._endpoints if not each.alive]:
            del self._endpoints[dead]
        return self._endpoints.setdefault(inner, FaultyEndpoint(inner, self._link))


class FaultyControl:
    """A control stream that loses messages of its owner: those that `loses` says, and nothing else.

    With `for_good`, or after `mute`, everything is lost from the first lost message on, the end of the stream
    included: to the peer it is as if the line were dead, which only its own deadline tells it.
    """

    def __init__(self, inner: Control, loses: Callable[[Message], bool], *, for_good: bool = False) -> None:
        self._inner = inner
        self._loses = loses
        self._for_good = for_good
        self._muted = False

    def mute(self) -> None:
        """From now on the peer hears nothing any more, not even the end."""
        self._muted = True

    async def send(self, message: Message) -> None:
        """See Control."""
        if self._muted:
            return
        if self._loses(message):
            self._muted = self._for_good
            return
        await self._inner.send(message)

    async def receive(self) -> Message | None:
        """See Control."""
        return await self._inner.receive()

    async def close(self) -> None:
        """See Control."""
        if not self._muted:
            await self._inner.close()

    async def aclose(self) -> None:
        """See Control; a muted stream stays open below."""
        if not self._muted:
            await self._inner.aclose()


class FaultyControls:
    """Loses the first acknowledgements of a worker, as its fault says."""

    def __init__(self, fault: Fault) -> None:
        self._left = fault.dropped_acknowledgements

    def over(self, control: Control) -> Control:
        """The stream as the worker gets to see it."""
        return FaultyControl(control, self._loses) if self._left else control

    def _loses(self, message: Message) -> bool:
        lost = isinstance(message, Acknowledge) and self._left > 0
        self._left -= lost
        return lost
