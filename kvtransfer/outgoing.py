"""One pull at the sending side.

Life of it here: Accepted is said → for each piece in order: wait until it is computed and posted, gather it into a
staging buffer, say Sent, send it (the next gather runs while it is on the wire) → Finished is said once the first
token is known → the acknowledgement ends it. When the request ends with its first token, Finished comes early and
posted receives that get no piece get a void message of one byte. When the offer fails, expires or is released, or
another receiver's pull of it fails, Sent with 0 bytes is said, void messages drain what the receiver has posted until
it has closed its half, and the pull ends with the error. When the receiver closes its half or dies, the same without a
word. Blocks are released when no gather of any pull reads them; staging buffers drain by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from kvtransfer.claims import Claim
from kvtransfer.copying import checksum
from kvtransfer.device import Buffer
from kvtransfer.equipment import Equipment
from kvtransfer.errors import ProtocolViolation, TransferAborted, TransferError, TransferExpired
from kvtransfer.manifest import Manifest, Piece
from kvtransfer.messages import Accepted, Acknowledge, Control, Finished, Posted, Sent
from kvtransfer.offer import Offer
from kvtransfer.staging import StagingBuffer
from kvtransfer.transport.base import Endpoint, Operation
from kvtransfer.waiting import while_well

log = logging.getLogger(__name__)

IN_FLIGHT: Final = 2
"""Pieces of one transfer that are gathered or on the wire at a time."""

_CLOSING_S: Final = 2.0
_GREETING_S: Final = 5.0
_VOID: Final = np.zeros(1, np.uint8)


class Outgoing:
    """Sends one offer to one receiver. `run` once, in a task that nobody cancels."""

    def __init__(
        self,
        offer: Offer,
        manifest: Manifest,
        control: Control,
        equipment: Equipment,
        claim: Claim,
        tag_base: int,
        crc: bool,
    ) -> None:
        self._offer = offer
        self._manifest = manifest
        self._control = control
        self._equipment = equipment
        self._claim = claim
        self._tag_base = tag_base
        self._crc = crc
        self._changed = asyncio.Event()
        self._error: TransferError | None = None
        self._posted = 0
        self._told = False
        self._acknowledged: int | None = None
        self._closed = False
        self._next = 0
        self._sent_bytes = 0
        self._endpoint: Endpoint | None = None
        self._flying: dict[Operation, StagingBuffer | None] = {}  # unresolved ones, void messages without a buffer
        self._wire_error: TransferError | None = None
        offer.listen(self._changed.set)

    def give_up(self, error: TransferError) -> None:
        """Ends the pull with `error`, unless it is ending already."""
        self._error = self._error or error
        self._changed.set()

    async def run(self) -> None:
        """Runs the pull. Afterwards it reads nothing of the offer's blocks, whatever happened; raises what it failed
        with.
        """
        reader = asyncio.ensure_future(self._read())
        try:
            await self._control.send(self._accepted())
            await self._send_pieces()
            await self._finish()
            self._offer.acknowledge(self._claim)
        except TransferError as error:
            self._offer.lose(self._claim, error)  # nothing reads the blocks between two pieces
            await self._tell_of_failure()
            raise
        finally:
            reader.cancel()
            await asyncio.wait([reader])
            self._offer.lose(self._claim, TransferAborted("its serving broke off"))

    async def drain(self) -> None:
        """After `run`: waits until the wire has let go of every staging buffer."""
        if self._endpoint is None:
            return
        for buffer in self._flying.values():
            if buffer:
                buffer.abandon()
        if not await self._equipment.drain(self._endpoint, list(self._flying)):
            for operation, buffer in self._flying.items():
                if buffer and not operation.resolved:
                    buffer.quarantine()

    def _accepted(self) -> Accepted:
        return Accepted(
            tokens=self._manifest.tokens,
            pieces=len(self._manifest.pieces),
            bytes=self._manifest.wire_bytes,
            layout=self._equipment.arena.layout,
            data_address=self._equipment.transport.address,
            transport=self._equipment.transport.name,
            tag_base=self._tag_base,
            encoding=self._manifest.encoding,
        )

    async def _read(self) -> None:
        try:
            while (message := await self._control.receive()) is not None:
                match message:
                    case Posted() if self._posted <= message.pieces <= len(self._manifest.pieces):
                        self._posted = message.pieces
                    case Acknowledge():
                        self._acknowledged = message.bytes
                    case _:
                        self.give_up(ProtocolViolation(f"the receiver said {message} out of turn"))
                self._changed.set()
            if self._acknowledged is None:
                self.give_up(TransferAborted("the receiver gave the transfer up"))
        except TransferError as error:
            self.give_up(error)
        except Exception as error:
            log.exception("the control stream of %s failed", self._offer.transfer_id)
            self.give_up(ProtocolViolation(f"the control stream failed: {error!r}"))
        finally:
            self._closed = True
            self._changed.set()

    async def _send_pieces(self) -> None:
        for piece in self._manifest.pieces:
            await self._until(partial(self._is_decided, piece))
            if self._ended_early():
                return
            await self._send(piece)

    def _is_decided(self, piece: Piece) -> bool:
        """It can be sent now, or will never be."""
        computed = self._offer.computed_tokens >= piece.token_end
        ready = computed and self._posted > piece.index and len(self._flying) < IN_FLIGHT
        return ready or self._ended_early()

    def _ended_early(self) -> bool:
        return self._offer.outcome is not None and self._offer.outcome.finished is not None

    async def _send(self, piece: Piece) -> None:
        equipment = self._equipment
        endpoint = self._endpoint
        if endpoint is None:
            endpoint = await while_well(self._connected(), self._until, self._changed)
        buffer = await equipment.staging.try_acquire(piece.wire_bytes)
        if buffer is None:
            acquiring = equipment.staging.acquire(piece.wire_bytes, self._offer.lease.remaining_s(equipment.clock))
            buffer = await while_well(acquiring, self._until, self._changed, undo=StagingBuffer.release)
        memory = buffer.memory[: piece.wire_bytes]
        try:
            crc32 = await equipment.copies.run(lambda: self._gather(piece, memory))
            self._raise_problem()
            await self._control.send(Sent(piece=piece.index, bytes=piece.wire_bytes, crc32=crc32))
        except BaseException:
            buffer.release()
            raise
        buffer.post()
        self._start(endpoint, piece.index, memory, buffer)
        self._next = piece.index + 1
        self._sent_bytes += piece.wire_bytes

    def _gather(self, piece: Piece, memory: Buffer) -> int | None:
        self._equipment.coder.gather(piece, self._offer.block_ids, memory, self._manifest.encoding)
        return checksum(memory) if self._crc else None

    def _start(self, endpoint: Endpoint, index: int, memory: Buffer, buffer: StagingBuffer | None) -> None:
        operation = endpoint.send(memory, self._tag_base + index)
        self._flying[operation] = buffer
        operation.on_resolved(partial(self._land, operation))

    def _land(self, operation: Operation) -> None:
        if buffer := self._flying.pop(operation):
            buffer.settle()
        self._wire_error = self._wire_error or operation.error
        self._changed.set()

    async def _connected(self) -> Endpoint:
        if self._endpoint is None:
            # The receiver posts only after its connection was answered, so this does not wait for long.
            self._endpoint = await self._equipment.transport.endpoint_of(self._claim.receiver, _GREETING_S)
        return self._endpoint

    async def _finish(self) -> None:
        await self._until(lambda: self._offer.outcome is not None)
        outcome = self._offer.outcome
        assert outcome is not None
        since_s = self._equipment.clock() - self._offer.computed_at_s
        await self._control.send(
            Finished(first_token_id=outcome.first_token_id, finished=outcome.finished, since_computed_s=since_s)
        )
        self._told = True
        self._offer.tell(self._claim)
        while self._acknowledged is None:
            await while_well(self._void_posted(), self._until, self._changed)
            await self._until(lambda: self._acknowledged is not None or self._posted > self._next)
        if self._acknowledged != self._sent_bytes:
            raise ProtocolViolation(f"{self._acknowledged} bytes were acknowledged of {self._sent_bytes} sent")

    async def _void_posted(self) -> None:
        """Sends a void message into every posted receive that gets no piece."""
        if self._posted <= self._next:
            return
        endpoint = await self._connected()
        for index in range(self._next, self._posted):
            self._start(endpoint, index, _VOID, None)
        self._next = self._posted

    async def _tell_of_failure(self) -> None:
        """Drains the receiver as far as it can be reached, until it has closed its half: then it posts no more."""
        with contextlib.suppress(TransferError):  # its stream may be gone while its data plane lives
            if not self._closed:
                await self._control.send(Sent(piece=self._next, bytes=0))
        with contextlib.suppress(TransferError, TimeoutError):  # its own deadline and connection tell it
            async with asyncio.timeout(_CLOSING_S):
                while self._wire_error is None:
                    self._changed.clear()
                    await self._void_posted()
                    if self._closed:
                        return
                    await self._changed.wait()

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Waits for `ready`, as long as the lease lasts and nothing is wrong."""
        self._raise_problem()
        if ready():
            return  # mostly so, and a timer costs more than the question
        try:
            async with asyncio.timeout(self._offer.lease.remaining_s(self._equipment.clock)):
                while not ready():
                    self._changed.clear()
                    await self._changed.wait()
                    self._raise_problem()
        except TimeoutError:
            raise TransferExpired(f"the lease of {self._offer.transfer_id} ended in mid-transfer") from None

    def _raise_problem(self) -> None:
        # An acknowledgement settles everything: what breaks after it does not matter.
        if self._acknowledged is not None and self._told:
            return
        for error in (self._offer.error, self._wire_error, self._error, self._offer.lost):
            if error:
                raise error
