"""The contract of a transport: tagged messages between peers, each named by (address, incarnation).

Life of a message here: the receiver posts a receive for a tag, then the sender sends with that tag into it. Both calls
return an Operation at once, which lives until the transport has let go of the buffer. Nothing cancels an operation:
on a cancel or a deadline the caller stops waiting and lets it drain; on a peer's death all operations of its
endpoint fail with PeerLost. After any failure an endpoint is aborted and never used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from kvtransfer.device import Buffer
from kvtransfer.errors import TransferError, TransferExpired

DRAIN_S: Final = 5.0
"""How long given-up operations may take to resolve by themselves before their endpoint is aborted."""

PROBE_TAGS: Final = 1 << 62
"""Set in the tags of a probe's messages, which measure a connection, and in those of no KV."""


@dataclass(slots=True)
class Counters:
    """What a transport has moved since its start. Only whole messages count; greetings do not."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    endpoints_aborted: int = 0
    operations_lost: int = 0
    """Operations that did not even resolve after their endpoint was aborted."""


class Operation:
    """One send or receive in flight: a strong task that nobody cancels, and that keeps its buffer referenced."""

    def __init__(self, work: Coroutine[None, None, bool], buffer: Buffer) -> None:
        self.bytes: Final = int(buffer.size)
        self._buffer = buffer
        self.task: Final = asyncio.ensure_future(work)
        # An operation that nobody waits for any more must not complain about its failure.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def resolved(self) -> bool:
        """Says whether the transport has let go of the buffer."""
        return self.task.done()

    @property
    def error(self) -> TransferError | None:
        """Why it failed: PeerLost, or TruncatedPiece for a message longer than the buffer. None while it runs or
        when it went well.
        """
        if not self.task.done() or self.task.cancelled():
            return None
        error = self.task.exception()
        return error if isinstance(error, TransferError) else None

    @property
    def filled(self) -> bool:
        """After success: the message filled the whole buffer. Always true for a send."""
        return self.task.done() and not self.task.cancelled() and self.task.exception() is None and self.task.result()

    def on_resolved(self, callback: Callable[[], None]) -> None:
        """Calls back on the event loop once it is resolved, well or badly; soon, if it is already."""
        self.task.add_done_callback(lambda _: callback())

    async def wait(self, timeout_s: float) -> bool:
        """Waits until it is resolved and returns `filled`; raises its error. TransferExpired: not yet; it goes on."""
        await asyncio.wait([self.task], timeout=timeout_s)
        if not self.task.done():
            raise TransferExpired(f"a message of {self.bytes} bytes was not through in {timeout_s:.1f} s")
        return self.task.result()


class Endpoint(Protocol):
    """A connection to one life of one peer."""

    @property
    def alive(self) -> bool:
        """False after an abort, a failure, or the peer's death as far as it is known."""

    @property
    def lanes(self) -> str:
        """What carries its messages, as transport/device: "tcp/lo", "rc_mlx5/mlx5_0:1,tcp/eth0"."""

    def send(self, buffer: Buffer, tag: int) -> Operation:
        """Starts sending. Its success is not delivery: that is the receiver's acknowledgement."""

    def receive(self, buffer: Buffer, tag: int) -> Operation:
        """Posts a receive. A message shorter than the buffer by 16 bytes or more succeeds without `filled`."""

    async def abort(self) -> None:
        """Breaks the connection: every operation of it fails soon, here and at the peer. Off the event loop, never
        raises.
        """


class Transport(Protocol):
    """One per process and incarnation. Everything is called on the event loop that started it."""

    @property
    def name(self) -> str:
        """For example "ucx"."""

    @property
    def address(self) -> bytes:
        """Where peers connect to; opaque. It names this incarnation. TransportUnavailable before start."""

    @property
    def counters(self) -> Counters:
        """What was moved."""

    @property
    def device_memory(self) -> bool:
        """Says whether buffers may lie in a GPU's memory; else staging is host memory. TransportUnavailable before
        start.
        """

    async def start(self) -> None:
        """Makes it usable. TransportUnavailable, with one clear line, when it cannot be."""

    async def connect(self, address: bytes, timeout_s: float) -> Endpoint:
        """The live endpoint to that address, made when there is none. When it returns, the peer has it in endpoint_of.

        PeerLost: nobody there, or another life than the address names. TransferExpired: no answer in time.
        """

    async def endpoint_of(self, incarnation: str, timeout_s: float) -> Endpoint:
        """The live endpoint over which that peer connected to us. PeerLost: it has not, in time."""

    async def aclose(self) -> None:
        """Aborts every endpoint, waits for the operations, frees everything, even when a step fails. Idempotent."""


async def drain(
    endpoint: Endpoint, operations: Iterable[Operation], counters: Counters, timeout_s: float = DRAIN_S
) -> bool:
    """Waits until all operations are resolved, and aborts the endpoint when they are not in time.

    False: some did not even resolve then. Their buffers must never be used again.
    """
    pending = [operation for operation in operations if not operation.resolved]
    for patience_s in (timeout_s, DRAIN_S):
        pending = await _unresolved(pending, patience_s)
        if not pending:
            return True
        await endpoint.abort()
    pending = await _unresolved(pending, DRAIN_S)
    counters.operations_lost += len(pending)
    return not pending


async def _unresolved(operations: list[Operation], timeout_s: float) -> list[Operation]:
    done = asyncio.Event()

    def check() -> None:
        if all(operation.resolved for operation in operations):
            done.set()

    for operation in operations:
        operation.on_resolved(check)
    check()
    try:
        async with asyncio.timeout(timeout_s):
            await done.wait()
    except TimeoutError:
        pass
    return [operation for operation in operations if not operation.resolved]
