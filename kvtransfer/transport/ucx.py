"""The UCX transport: two-sided tagged messages through ucxx (or the older ucp), the only module that imports either.

Peers connect by UCX worker address, not through a listener: ucxx's listener binds to every interface, a worker
listens only on the devices that it is given. Error handling is always on: without it a peer's death hangs or kills
this process.

Life of a connection here: the connecting side makes an endpoint to the address and sends a greeting (the life it
means, its own life, its own worker address) with the address's greeting tag → the other side makes an endpoint back,
replaces any older one of that peer, and answers → both are usable. When any operation fails, or the peer's death is
seen, the endpoint is aborted and forgotten, with a farewell to the peer where it can be reached; the next connect
makes a new one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import struct
import zlib
from typing import Final

import numpy as np

from kvtransfer.device import Buffer
from kvtransfer.errors import PeerLost, TransferExpired, TransportUnavailable
from kvtransfer.transport import ucx_library
from kvtransfer.transport.base import Counters, Operation
from kvtransfer.transport.ucx_endpoint import UcxEndpoint

log = logging.getLogger(__name__)

_ADDRESS: Final = struct.Struct("<4s16sI")  # magic, incarnation, CRC-32 of the worker address that follows
_MAGIC: Final = b"DKV1"
_GREETING: Final = struct.Struct("<16s16sQH")  # incarnation meant, own incarnation, tag of the answer, address length
_GREETING_BYTES: Final = 1024
_OWN_TAGS: Final = 1 << 63  # the top bit; tags of pieces leave it clear
_LINGER_S: Final = 5.0
_NOTHING: Final = np.zeros(1, np.uint8)


class UcxTransport:
    """UCX between processes. One per process: UCX has one context there.

    `incarnation` is 16 characters. `host` chooses the network device by its address: "127.0.0.1" stays on this machine,
    "0.0.0.0" uses every device. `UCX_*` environment variables win over every setting made here. On a CPU (`cuda` false)
    only tcp is used, unless UCX_TLS says otherwise: shared-memory transports kill or hang the survivor of a peer's
    death.
    """

    name = "ucx"

    def __init__(self, incarnation: str, *, host: str = "127.0.0.1", cuda: bool = False) -> None:
        if len(incarnation.encode()) != 16:
            raise ValueError(f"an incarnation has 16 characters, not {incarnation!r}")
        self._incarnation = incarnation
        self._host = host
        self._cuda = cuda
        self._library: ucx_library.Library | None = None
        self._counters = Counters()
        self._connected: dict[bytes, UcxEndpoint] = {}
        self._connecting: dict[bytes, asyncio.Lock] = {}
        self._accepted: dict[str, UcxEndpoint] = {}
        self._arrival = asyncio.Condition()
        self._to_self: UcxEndpoint | None = None
        self._greeter: asyncio.Task[None] | None = None
        self._operations: set[Operation] = set()
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> bytes:
        """See Transport."""
        worker = self._running().address
        return _ADDRESS.pack(_MAGIC, self._incarnation.encode(), zlib.crc32(worker)) + worker

    @property
    def counters(self) -> Counters:
        """See Transport."""
        return self._counters

    @property
    def device_memory(self) -> bool:
        """See Transport."""
        return self._cuda and any("cuda" in name for name in self._running().transports())

    @property
    def devices(self) -> str:
        """Which UCX transports are in use, for example "tcp"."""
        return ",".join(sorted(self._running().transports()))

    async def start(self) -> None:
        """See Transport. Takes half a second."""
        if self._library is not None:
            raise TransportUnavailable("the ucx transport is started already")
        library = ucx_library.open_library(host=self._host, cuda=self._cuda)
        try:
            # Shows that UCX works here, waits until its thread runs, and stops the greeter in the end.
            self._to_self = UcxEndpoint(await library.connect(library.address), self)
        except ucx_library.Failed as error:
            library.close()
            raise TransportUnavailable(f"UCX cannot connect even to itself: {error}") from error
        self._library = library
        self._greeter = asyncio.ensure_future(self._answer_greetings())

    async def connect(self, address: bytes, timeout_s: float) -> UcxEndpoint:
        """See Transport."""
        lock = self._connecting.setdefault(address, asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_s), lock:
                known = self._connected.get(address)
                if known and known.alive:
                    return known
                endpoint = self._connected[address] = await self._greet(address, timeout_s)
                return endpoint
        except TimeoutError:
            raise TransferExpired(f"the peer did not answer in {timeout_s:.1f} s") from None
        finally:
            if not lock.locked():
                self._connecting.pop(address, None)

    async def endpoint_of(self, incarnation: str, timeout_s: float) -> UcxEndpoint:
        """See Transport."""
        try:
            async with asyncio.timeout(timeout_s), self._arrival:
                await self._arrival.wait_for(lambda: self._live(incarnation))
        except TimeoutError:
            raise PeerLost(f"incarnation {incarnation} is not connected") from None
        return self._accepted[incarnation]

    async def aclose(self) -> None:
        """See Transport."""
        library, self._library = self._library, None
        if library is None:
            return
        try:
            await asyncio.gather(*(each.abort() for each in {*self._connected.values(), *self._accepted.values()}))
            await self._stop_greeter()
            while waiting := [*self._aborts, *(each.task for each in self._operations)]:
                done, _ = await asyncio.wait(waiting, timeout=_LINGER_S)
                if not done:
                    log.warning("%d UCX operations did not end", len(waiting))
                    break
        finally:
            await asyncio.to_thread(library.close)

    def track(self, operation: Operation) -> Operation:
        """Keeps an operation until it is resolved."""
        self._operations.add(operation)
        operation.on_resolved(lambda: self._operations.discard(operation))
        return operation

    def forget(self, endpoint: UcxEndpoint, aborting: asyncio.Task[None]) -> None:
        """Takes a failed endpoint out of the tables, and keeps its abort until it is done."""
        for table in (self._connected, self._accepted):
            for key in [key for key, each in table.items() if each is endpoint]:
                del table[key]  # type: ignore[arg-type]
        self._aborts.add(aborting)
        aborting.add_done_callback(self._aborts.discard)

    def _running(self) -> ucx_library.Library:
        if self._library is None:
            raise TransportUnavailable("the ucx transport is not started")
        return self._library

    def _live(self, incarnation: str) -> bool:
        endpoint = self._accepted.get(incarnation)
        return endpoint is not None and endpoint.alive

    async def _greet(self, address: bytes, timeout_s: float) -> UcxEndpoint:
        library = self._running()
        incarnation, worker = _parse(address)
        try:
            endpoint = UcxEndpoint(await library.connect(worker), self)
        except ucx_library.Failed as error:
            raise PeerLost(f"the peer cannot be reached: {error}") from error
        tag = _OWN_TAGS | secrets.randbits(61) << 2  # and the next two, for the farewells
        own = self._incarnation.encode()
        greeting = _GREETING.pack(incarnation, own, tag, len(library.address)) + library.address
        try:
            answer = endpoint.post_greeting(np.zeros(1, np.uint8), tag)
            await endpoint.send_greeting(_padded(greeting), _greeting_tag(incarnation)).wait(timeout_s)
            await answer.wait(timeout_s)
            endpoint.expect_farewell(tag + 1, tag + 2)
        except BaseException:
            endpoint.give_up()
            raise
        return endpoint

    async def _answer_greetings(self) -> None:
        library = self._running()
        own = self._incarnation.encode()
        while True:
            buffer = np.zeros(_GREETING_BYTES, np.uint8)
            try:
                await library.receive(buffer, _greeting_tag(own))
            except ucx_library.Failed:
                log.exception("greetings of peers cannot be received any more")
                return
            meant, peer, tag, length = _GREETING.unpack_from(buffer.data)
            if peer == own and length == 0:
                return  # from ourselves, to stop
            if meant == own:
                await self._answer(
                    library, peer.decode(errors="replace"), tag, bytes(buffer[_GREETING.size :][:length])
                )

    async def _answer(self, library: ucx_library.Library, peer: str, tag: int, worker: bytes) -> None:
        try:
            endpoint = UcxEndpoint(await library.connect(worker), self)
        except ucx_library.Failed as error:
            log.warning("peer %s connected, but cannot be reached: %s", peer, error)
            return
        older = self._accepted.get(peer)
        self._accepted[peer] = endpoint
        if older:
            older.give_up()
        async with self._arrival:
            self._arrival.notify_all()
        endpoint.expect_farewell(tag + 2, tag + 1)
        endpoint.send_greeting(_NOTHING, tag)

    async def _stop_greeter(self) -> None:
        """The posted receive must not be cancelled: a last greeting, to ourselves, fills it."""
        own = self._incarnation.encode()
        if self._to_self and self._greeter:
            self._to_self.send_greeting(_padded(_GREETING.pack(own, own, 0, 0)), _greeting_tag(own))
            await asyncio.wait([self._greeter], timeout=_LINGER_S)
            await self._to_self.abort()


def _parse(address: bytes) -> tuple[bytes, bytes]:
    """Splits an address into incarnation and worker address. UCX crashes on a malformed one, hence the checksum."""
    if len(address) > _ADDRESS.size:
        magic, incarnation, crc32 = _ADDRESS.unpack_from(address)
        worker = address[_ADDRESS.size :]
        if magic == _MAGIC and zlib.crc32(worker) == crc32:
            return incarnation, worker
    raise PeerLost("that is not the address of a ucx transport")


def _padded(greeting: bytes) -> Buffer:
    if len(greeting) > _GREETING_BYTES:
        raise TransportUnavailable(f"the UCX worker address is too long to greet with: {len(greeting)} bytes")
    return np.frombuffer(greeting.ljust(_GREETING_BYTES, b"\0"), np.uint8).copy()


def _greeting_tag(incarnation: bytes) -> int:
    return _OWN_TAGS | int.from_bytes(hashlib.blake2b(incarnation, digest_size=8).digest()) >> 1
