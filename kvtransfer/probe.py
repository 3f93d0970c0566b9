"""What a connection can do: latency, bandwidth, and whether bytes arrive as they left. For two workers that meet.

Life of a probe here: the sending side makes an Invitation (where it is, and tags of its own), which reaches the
receiving side by a call of yours → that connects, and gives commands, one at a time: PING is answered at once, SEND n
with n messages of a pattern that both sides know, END ends it. Commands, answers and patterns have tags and buffers of
their own, so no transfer ever sees them. A failure fails the probe alone, and is told; what is left of it on the wire
drains like a transfer's. The receiving side always says END, so that a probe given up leaves no receive posted.

It costs some 40 MB on the wire and, over tcp, 0.1 s of CPU on each side; on a slow link it moves less. Afterwards the
connection is made, its windows are open, and staging memory is there: the first transfer need not wait for any of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from kvtransfer.device import Buffer, clear, copy_from_host, copy_to_host
from kvtransfer.equipment import Equipment
from kvtransfer.errors import ProtocolViolation, TruncatedPiece
from kvtransfer.lease import Lease
from kvtransfer.manifest import PIECE_BYTES
from kvtransfer.messages import Address
from kvtransfer.staging import StagingBuffer
from kvtransfer.states import BufferState
from kvtransfer.transport.base import Endpoint, Operation

PINGS: Final = 8
"""Round trips that are measured, after one that is not."""

WINDOW: Final = 4
"""Messages of PIECE_BYTES in flight, as many as a transfer has posted."""

ROUND_S: Final = 0.2
"""A round of messages is as short as this, or one message."""

_ROUNDS: Final = 2
_MOST: Final = 64  # commands, and answers; tags of answers come after those of commands
_FAST: Final = ("rc", "dc", "ud", "cuda_ipc", "rocm_ipc", "ze_ipc")  # how UCX's own names begin


class _Command(IntEnum):
    END = 0
    PING = 1
    SEND = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """Where the sending side is, and the tags [tag_base, tag_base + 65,536) that are the probe's. `receiver` is the
    incarnation that is invited.
    """

    receiver: str
    data_address: Address
    transport: str
    tag_base: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a probe found. `lanes` as Endpoint has it; `bytes` were moved and compared."""

    lanes: str
    round_trip_s: float
    bytes_per_s: float
    bytes: int


def shortfall(lanes: str, *, cuda: bool, rdma_devices: Iterable[str]) -> str | None:
    """Why better than plain TCP was to be expected where TCP alone was got; None when all is as it should be."""
    used = {lane.partition("/")[0] for lane in lanes.split(",")}
    devices = [*(["a GPU"] if cuda else []), *rdma_devices]
    if not devices or "tcp" not in used or any(name.startswith(_FAST) for name in used):
        return None
    return f"plain TCP ({lanes}) where {', '.join(devices)} should carry it; see UCX_TLS, UCX_NET_DEVICES and --host"


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """Names of this machine's RDMA devices."""
    return tuple(sorted(each.name for each in root.iterdir())) if root.is_dir() else ()


class _Exchange:
    """What both sides of a probe have: messages on the wire, and buffers under them."""

    def __init__(self, equipment: Equipment, invitation: Invitation, lease: Lease) -> None:
        self._equipment = equipment
        self._tag_base = invitation.tag_base
        self._lease = lease
        self._pattern = _pattern(invitation.tag_base)
        self._endpoint: Endpoint | None = None
        self._operations: list[Operation] = []
        self._buffers: list[StagingBuffer] = []

    async def drain(self) -> None:
        """After `run`: waits until the wire has let go of everything."""
        for buffer in self._buffers:
            if buffer.state is BufferState.POSTED:
                buffer.abandon()
        pending = [operation for operation in self._operations if not operation.resolved]
        if self._endpoint and not await self._equipment.drain(self._endpoint, pending):
            for buffer in self._buffers:
                if buffer.state is BufferState.DRAINING:
                    buffer.quarantine()
        for buffer in self._buffers:
            buffer.settle()

    async def _borrow(self) -> StagingBuffer:
        buffer = await self._equipment.staging.acquire(PIECE_BYTES, self._remaining_s())
        self._buffers.append(buffer)
        return buffer

    def _send(self, memory: Buffer, tag: int) -> Operation:
        return self._keep(self._connected().send(memory, self._tag_base + tag))

    def _receive(self, memory: Buffer, tag: int) -> Operation:
        return self._keep(self._connected().receive(memory, self._tag_base + tag))

    def _keep(self, operation: Operation) -> Operation:
        self._operations = [each for each in self._operations if not each.resolved]
        self._operations.append(operation)
        return operation

    def _connected(self) -> Endpoint:
        assert self._endpoint is not None, "run connects first"
        return self._endpoint

    def _remaining_s(self) -> float:
        return self._lease.remaining_s(self._equipment.clock)


class Answering(_Exchange):
    """The sending side: does what the other one says. `run` once, then `drain`."""

    async def run(self, receiver: str) -> None:
        """Obeys until END. PeerLost: the receiver has not connected; TransferExpired: no END in time;
        ProtocolViolation: no command, or too many.
        """
        self._endpoint = await self._equipment.transport.endpoint_of(receiver, self._remaining_s())
        buffer = await self._borrow()
        memory = buffer.memory[:PIECE_BYTES]
        await self._equipment.copies.run(lambda: copy_from_host(self._pattern, memory))
        buffer.post()
        answers = 0
        for index in range(_MOST):
            word = np.zeros(2, np.uint8)
            await self._receive(word, index).wait(self._remaining_s())
            command, count = int(word[0]), int(word[1])
            if command == _Command.END:
                return
            known = command in (_Command.PING, _Command.SEND)
            if not known or not 0 < count <= WINDOW or answers + count > _MOST:
                raise ProtocolViolation(f"a probe has no command {command} for {count} answers after {answers}")
            content = memory if command == _Command.SEND else word
            sends = [self._send(content, _MOST + answers + each) for each in range(count)]
            answers += count
            for send in sends:
                await send.wait(self._remaining_s())
        raise ProtocolViolation(f"a probe has no more than {_MOST} commands")


class Probe(_Exchange):
    """The receiving side: says what is to be done, measures and compares. `run` once, then `drain`."""

    def __init__(self, equipment: Equipment, invitation: Invitation, lease: Lease) -> None:
        super().__init__(equipment, invitation, lease)
        self._address = invitation.data_address
        self._said = 0
        self._answers = 0
        self._compared = 0

    async def run(self) -> Measured:
        """Connects and measures. PeerLost, TransferExpired; TruncatedPiece: bytes did not arrive as they left."""
        self._endpoint = await self._equipment.transport.connect(self._address, self._remaining_s())
        try:
            round_trip_s = statistics.median([await self._ping() for _ in range(PINGS + 1)][1:])
            bytes_per_s = await self._bandwidth(round_trip_s)
        finally:
            self._say(_Command.END)
        return Measured(
            lanes=self._endpoint.lanes, round_trip_s=round_trip_s, bytes_per_s=bytes_per_s, bytes=self._compared
        )

    async def _ping(self) -> float:
        answer = self._expect(np.zeros(2, np.uint8))
        begin_s = self._equipment.clock()
        self._say(_Command.PING)
        await answer.wait(self._remaining_s())
        return self._equipment.clock() - begin_s

    async def _bandwidth(self, round_trip_s: float) -> float:
        """Bytes a second: of one message when more would take long, else the best of some rounds."""
        buffers = [await self._borrow() for _ in range(WINDOW)]
        first = await self._round(buffers[:1], round_trip_s)
        count = min(WINDOW, int(first * ROUND_S / PIECE_BYTES))
        if count == 0:
            return first
        return max([await self._round(buffers[:count], round_trip_s) for _ in range(_ROUNDS)])

    async def _round(self, buffers: list[StagingBuffer], round_trip_s: float) -> float:
        memories = [buffer.memory[:PIECE_BYTES] for buffer in buffers]
        await self._equipment.copies.run(lambda: clear(memories))
        arrivals = [self._expect(memory) for memory in memories]
        for buffer in buffers:
            buffer.post()
        begin_s = self._equipment.clock()
        self._say(_Command.SEND, len(buffers))
        filled = [await arrival.wait(self._remaining_s()) for arrival in arrivals]
        took_s = self._equipment.clock() - begin_s
        for buffer in buffers:
            buffer.take()
        if not all(filled) or not await self._equipment.copies.run(partial(self._all_as_sent, memories)):
            raise TruncatedPiece("the bytes of a probe did not arrive as they left")
        self._compared += len(buffers) * PIECE_BYTES
        return len(buffers) * PIECE_BYTES / max(took_s - round_trip_s / 2, took_s / 2, 1e-9)

    def _all_as_sent(self, memories: list[Buffer]) -> bool:
        return all(copy_to_host(memory) == self._pattern for memory in memories)

    def _expect(self, memory: Buffer) -> Operation:
        self._answers += 1
        return self._receive(memory, _MOST + self._answers - 1)

    def _say(self, command: _Command, count: int = 1) -> None:
        self._said += 1
        self._send(np.array([command, count], np.uint8), self._said - 1)


def _pattern(seed: int) -> bytes:
    """PIECE_BYTES that differ at every place and in every probe: what is lost, moved or left over is seen."""
    words = np.arange(PIECE_BYTES // 8, dtype=np.uint64)
    return ((words + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)).tobytes()
