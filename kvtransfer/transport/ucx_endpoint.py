"""One UCX connection: its operations, its failures, its end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Coroutine
from typing import Final, Protocol

import numpy as np

from kvtransfer.device import Buffer, copy_from_host, copy_to_host
from kvtransfer.errors import PeerLost, TruncatedPiece
from kvtransfer.transport import ucx_library
from kvtransfer.transport.base import Counters, Operation

_CANARY_BYTES: Final = 16
_FAREWELL_S: Final = 0.2
_NOTHING: Final = np.zeros(1, np.uint8)


class Owner(Protocol):
    """What an endpoint needs of the transport that made it."""

    @property
    def counters(self) -> Counters:
        """Where it counts."""

    def track(self, operation: Operation) -> Operation:
        """Keeps an operation until it is resolved."""

    def forget(self, endpoint: UcxEndpoint, aborting: asyncio.Task[None]) -> None:
        """Takes a failed endpoint out of use, and keeps its abort until it is done."""


class UcxEndpoint:
    """A connection to one life of one peer."""

    def __init__(self, raw: ucx_library.RawEndpoint, owner: Owner) -> None:
        self._raw = raw
        self._owner = owner
        self._aborting: asyncio.Task[None] | None = None
        self._farewell: Operation | None = None
        self._farewell_tag = 0

    @property
    def alive(self) -> bool:
        """See Endpoint."""
        return self._aborting is None and self._raw.alive

    @property
    def lanes(self) -> str:
        """See Endpoint."""
        return self._raw.lanes()

    def send(self, buffer: Buffer, tag: int) -> Operation:
        """See Endpoint."""
        return self._owner.track(Operation(self._send(buffer, tag), buffer))

    def receive(self, buffer: Buffer, tag: int) -> Operation:
        """See Endpoint."""
        return self._owner.track(Operation(self._receive(buffer, tag), buffer))

    async def abort(self) -> None:
        """See Endpoint."""
        await asyncio.shield(self.give_up())

    def send_greeting(self, buffer: Buffer, tag: int) -> Operation:
        """Like send, and not counted."""
        return self._owner.track(Operation(self._send_uncounted(buffer, tag), buffer))

    def post_greeting(self, buffer: Buffer, tag: int) -> Operation:
        """Like receive, and neither counted nor measured."""
        return self._owner.track(Operation(self._receive_uncounted(buffer, tag), buffer))

    def expect_farewell(self, own_tag: int, peer_tag: int) -> None:
        """Posts a receive for the peer's farewell, which ends this side too: UCX tells a peer's death, but not its
        abort.
        """
        self._farewell_tag = peer_tag
        self._farewell = self.post_greeting(np.zeros(1, np.uint8), own_tag)
        self._farewell.on_resolved(self._forsaken)

    def _forsaken(self) -> None:
        self.give_up()

    def give_up(self) -> asyncio.Task[None]:
        """Starts to abort, without waiting for the end."""
        if self._aborting is None:
            self._owner.counters.endpoints_aborted += 1
            self._aborting = asyncio.ensure_future(self._abort())
            self._owner.forget(self, self._aborting)
        return self._aborting

    async def _send_uncounted(self, buffer: Buffer, tag: int) -> bool:
        await self._guard(self._raw.send(buffer, tag))
        return True

    async def _receive_uncounted(self, buffer: Buffer, tag: int) -> bool:
        await self._guard(self._raw.receive(buffer, tag))
        return True

    async def _send(self, buffer: Buffer, tag: int) -> bool:
        await self._send_uncounted(buffer, tag)
        self._owner.counters.bytes_sent += int(buffer.size)
        self._owner.counters.messages_sent += 1
        return True

    async def _receive(self, buffer: Buffer, tag: int) -> bool:
        # UCX does not say how long a received message was. Random bytes at the end tell: they survive whole only
        # where the message is shorter by as many, and a piece is short by no less than a head of one token.
        canary = secrets.token_bytes(min(_CANARY_BYTES, int(buffer.size)))
        tail = buffer[buffer.size - len(canary) :]
        copy_from_host(canary, tail)
        await self._guard(self._raw.receive(buffer, tag))
        filled = len(canary) < _CANARY_BYTES or copy_to_host(tail) != canary
        if filled:
            self._owner.counters.bytes_received += int(buffer.size)
            self._owner.counters.messages_received += 1
        return filled

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        if self._aborting:
            work.close()
            raise PeerLost("the connection is closed")
        try:
            await work
        except ucx_library.Oversized as error:
            self.give_up()
            raise TruncatedPiece(f"a longer message came than the receive was posted for: {error}") from error
        except ucx_library.Failed as error:
            self.give_up()
            raise PeerLost(f"the connection to the peer is lost: {error}") from error

    async def _abort(self) -> None:
        if self._farewell and self._raw.alive:
            await asyncio.wait([Operation(self._say_farewell(), _NOTHING).task], timeout=_FAREWELL_S)
            # The peer answers with its own; that, or a little time, shows that ours has left.
            await asyncio.wait([self._farewell.task], timeout=_FAREWELL_S)
        await asyncio.to_thread(self._raw.abort)  # may block for seconds

    async def _say_farewell(self) -> bool:
        with contextlib.suppress(ucx_library.Failed):
            await self._raw.send(_NOTHING, self._farewell_tag)
        return True
