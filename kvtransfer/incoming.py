"""One pull at the receiving side.

Life of it here: Open is said → Accepted is compared with our own plan → the data plane connects → receives are
posted for a window of pieces and said → each piece that has arrived whole is scattered into the blocks, and the
window moves on → Finished and the last piece come → everything is acknowledged. On a cancel, the deadline, a failing
sender or a dead one: no scatter starts any more, our half of the control stream is closed (so that the sender voids
what is posted), and the staging buffers drain; where they do not, the endpoint is aborted. Blocks are only ever
written by a scatter: once none runs, they are the caller's again, and late bytes end in staging.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvtransfer.copying import checksum
from kvtransfer.device import Buffer
from kvtransfer.equipment import Equipment
from kvtransfer.errors import (
    LayoutMismatch,
    PeerLost,
    ProtocolViolation,
    TransferAborted,
    TransferError,
    TransferExpired,
    TruncatedPiece,
)
from kvtransfer.layout import Area, overlap
from kvtransfer.lease import Lease
from kvtransfer.manifest import Manifest, Piece, plan, require_same_manifest
from kvtransfer.messages import Accepted, Acknowledge, Control, Finished, Open, Posted, Sent
from kvtransfer.received import Received
from kvtransfer.staging import StagingBuffer
from kvtransfer.states import RECEIVE_TRANSITIONS, BufferState, Life, ReceiveState
from kvtransfer.transport.base import Endpoint, Operation
from kvtransfer.waiting import while_well

log = logging.getLogger(__name__)

WINDOW: Final = 4
"""Pieces of one transfer with a posted receive at a time."""

_REFILL: Final = 2
"""The window is filled up when so many are left in it, which the sender may have in flight: one word says two posts."""

_CLOSING_S: Final = 2.0


@dataclass(slots=True)
class _Post:
    operation: Operation
    buffer: StagingBuffer
    memory: Buffer
    arrived_s: float | None = None


class Incoming:
    """Receives one transfer into `block_ids`. `run` once, in a task that nobody cancels; then `drain`."""

    def __init__(
        self,
        control: Control,
        opening: Open,
        block_ids: tuple[int, ...],
        tokens: int,
        area: Area,
        equipment: Equipment,
        lease: Lease,
    ) -> None:
        self._control = control
        self._opening = opening
        self._block_ids = block_ids
        self._tokens = tokens
        self._area = area
        self._equipment = equipment
        self._lease = lease
        self._changed = asyncio.Event()
        self._error: TransferError | None = None
        self._accepted: Accepted | None = None
        self._sent: dict[int, tuple[Sent, float]] = {}
        self._stream_error: TransferError | None = None
        self._voided = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._finished: Finished | None = None
        self._finished_s = 0.0
        self._endpoint: Endpoint | None = None
        self._posts: list[_Post] = []
        self._placed = 0
        self._started_s = equipment.clock()
        self._life = Life(f"pull {opening.transfer_id}", ReceiveState.OPENING, RECEIVE_TRANSITIONS)
        self._reader: asyncio.Task[None] | None = asyncio.ensure_future(self._read())

    def give_up(self, error: TransferError) -> None:
        """Ends the pull with `error`, unless it is ending already. No scatter starts after this."""
        self._error = self._error or error
        self._changed.set()

    async def run(self) -> Received:
        """Runs the pull; raises what it failed with. When it ends, in whatever way, nothing writes to the blocks any
        more.
        """
        try:
            await self._control.send(self._opening)
            manifest = await self._agree()
            await self._receive(manifest)
            await self._until(lambda: self._finished is not None and self._all_resolved())
            received = self._received()
            await self._control.send(Acknowledge(bytes=received.bytes))
            self._life.advance(ReceiveState.RECEIVED)
            return received
        except BaseException as error:
            self.give_up(error if isinstance(error, TransferError) else TransferAborted("the receiver failed"))
            self._life.advance(ReceiveState.DRAINING)
            await self._control.close()
            if self._voided and self._reader:  # the sender has announced that it gives up; its stream ends with why
                await asyncio.wait([self._reader], timeout=_CLOSING_S)
            if self._stream_error and isinstance(error, TransferError):
                raise self._stream_error from None
            raise

    async def quiet(self) -> None:
        """After `give_up`: waits, for milliseconds, until nothing writes to the blocks any more."""
        await self._quiet.wait()

    async def drain(self) -> None:
        """After `run`: waits until the wire has let go of every staging buffer, then ends the control stream."""
        for post in self._posts:
            if post.buffer.state is BufferState.POSTED:
                post.buffer.abandon()
                post.operation.on_resolved(post.buffer.settle)
        operations = [post.operation for post in self._posts]
        if self._endpoint and isinstance(self._error, PeerLost):
            await self._endpoint.abort()  # the sender cannot void what is posted, and may have dropped its end already
        if self._endpoint and not await self._equipment.drain(self._endpoint, operations):
            for post in self._posts:
                if not post.operation.resolved:
                    post.buffer.quarantine()
        if self._reader:
            self._reader.cancel()
            await asyncio.wait([self._reader])
            self._reader = None  # a cancelled task keeps its frames, and they keep this pull: a cycle
        await self._control.aclose()
        self._life.advance(ReceiveState.CLOSED)

    async def _read(self) -> None:
        try:
            while (message := await self._control.receive()) is not None:
                now_s = self._equipment.clock()
                match message:
                    case Accepted() if self._accepted is None:
                        self._accepted = message
                    case Sent(bytes=0):
                        self._voided = True
                    case Sent() if message.piece == len(self._sent) and self._finished is None:
                        self._sent[message.piece] = (message, now_s)
                    case Finished() if self._finished is None:
                        self._finished, self._finished_s = message, now_s
                    case _:
                        self.give_up(ProtocolViolation(f"the sender said {message} out of turn"))
                self._changed.set()
            self.give_up(PeerLost("the sender ended the stream"))
        except TransferError as error:
            self._stream_error = error
            self.give_up(error)
        except Exception as error:
            log.exception("the control stream of %s failed", self._opening.transfer_id)
            self.give_up(ProtocolViolation(f"the control stream failed: {error!r}"))

    async def _agree(self) -> Manifest:
        await self._until(lambda: self._accepted is not None)
        accepted = self._accepted
        assert accepted is not None
        area = overlap(accepted.layout, self._opening.layout)
        if area != self._area:
            raise LayoutMismatch(f"the sender brings {area}, not {self._area}")
        if accepted.encoding != "plain" and accepted.encoding not in self._opening.allowed.encodings:
            raise ProtocolViolation(f"the sender chose {accepted.encoding}, which was not allowed")
        skip_tokens = self._opening.skip_tokens
        manifest = plan(accepted.layout, self._opening.layout, self._tokens, skip_tokens, accepted.encoding)
        require_same_manifest(manifest, tokens=accepted.tokens, pieces=accepted.pieces, total_bytes=accepted.bytes)
        if accepted.transport != self._equipment.transport.name:
            raise PeerLost(f"the sender speaks {accepted.transport}, we speak {self._equipment.transport.name}")
        self._life.advance(ReceiveState.RECEIVING)
        return manifest

    async def _receive(self, manifest: Manifest) -> None:
        if not manifest.pieces:
            return
        assert self._accepted is not None
        self._endpoint = await self._equipment.transport.connect(self._accepted.data_address, self._remaining_s())
        await self._post_window(manifest.pieces)
        for piece in manifest.pieces:
            await self._until(partial(self._is_decided, piece))
            if not self._arrived(piece):
                return
            await self._place(piece, self._posts[piece.index])
            await self._post_window(manifest.pieces)

    async def _post_window(self, pieces: tuple[Piece, ...]) -> None:
        """When little is left of the window: posts receives until it is full, or no more staging is free but one piece
        is posted; says how far.
        """
        assert self._endpoint is not None and self._accepted is not None
        before = len(self._posts)
        if before - self._placed > _REFILL:
            return
        while len(self._posts) < min(len(pieces), self._placed + WINDOW) and not self._is_over():
            piece = pieces[len(self._posts)]
            buffer = await self._equipment.staging.try_acquire(piece.wire_bytes)
            if buffer is None:
                if len(self._posts) > self._placed:
                    break
                acquiring = self._equipment.staging.acquire(piece.wire_bytes, self._remaining_s())
                buffer = await while_well(acquiring, self._until, self._changed, undo=StagingBuffer.release)
            memory = buffer.memory[: piece.wire_bytes]
            operation = self._endpoint.receive(memory, self._accepted.tag_base + piece.index)
            buffer.post()
            post = _Post(operation, buffer, memory)
            operation.on_resolved(partial(self._note_arrival, post))
            self._posts.append(post)
        if len(self._posts) > before:
            await self._control.send(Posted(pieces=len(self._posts)))

    def _is_over(self) -> bool:
        """Says whether the sender will not send what is not posted yet."""
        ended = self._finished is not None and self._finished.finished is not None
        return ended or self._voided or self._error is not None

    def _note_arrival(self, post: _Post) -> None:
        post.arrived_s = self._equipment.clock()
        self._changed.set()

    def _arrived(self, piece: Piece) -> bool:
        posted = len(self._posts) > piece.index and self._posts[piece.index].operation.resolved
        return posted and piece.index in self._sent

    def _is_decided(self, piece: Piece) -> bool:
        """It is here, or will not come: after Finished, a piece that was not said to be sent is void."""
        return self._arrived(piece) or (self._finished is not None and piece.index not in self._sent)

    async def _place(self, piece: Piece, post: _Post) -> None:
        sent, _ = self._sent[piece.index]
        if not post.operation.filled or sent.bytes != piece.wire_bytes:
            raise TruncatedPiece(f"piece {piece.index} is not the {piece.wire_bytes} bytes that it should be")
        post.buffer.take()
        self._quiet.clear()
        try:
            await self._equipment.copies.run(lambda: self._scatter(piece, post.memory, sent.crc32))
        finally:
            self._quiet.set()
            post.buffer.release()
        self._placed += 1

    def _scatter(self, piece: Piece, memory: Buffer, crc32: int | None) -> None:
        if crc32 is not None and checksum(memory) != crc32:
            raise TruncatedPiece(f"piece {piece.index} arrived damaged")
        assert self._accepted is not None
        self._equipment.coder.scatter(piece, self._block_ids, memory, self._accepted.encoding)

    def _all_resolved(self) -> bool:
        return all(post.operation.resolved for post in self._posts)

    def _received(self) -> Received:
        assert self._finished is not None and self._accepted is not None
        if self._finished.finished is None and self._placed < self._accepted.pieces:
            raise ProtocolViolation(f"the sender finished after {self._placed} of {self._accepted.pieces} pieces")
        now_s = self._equipment.clock()
        return Received(
            first_token_id=self._finished.first_token_id,
            finished=self._finished.finished,
            bytes=sum(sent.bytes for sent, _ in self._sent.values()),
            pieces=self._placed,
            duration_s=now_s - self._started_s,
            exposed_s=now_s - self._finished_s + self._finished.since_computed_s,
            wire_s=self._wire_s(),
            transport=self._equipment.transport.name,
            encoding=self._accepted.encoding,
        )

    def _wire_s(self) -> float:
        """Length of the union of the intervals from Sent to arrival."""
        total_s, end_s = 0.0, float("-inf")
        for post, (_, sent_s) in zip(self._posts, self._sent.values(), strict=False):
            if post.arrived_s is not None and post.arrived_s > max(sent_s, end_s):
                total_s += post.arrived_s - max(sent_s, end_s)
                end_s = post.arrived_s
        return total_s

    def _remaining_s(self) -> float:
        return self._lease.remaining_s(self._equipment.clock)

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Waits for `ready`, as long as the deadline allows and nothing is wrong."""
        self._raise_problem()
        if ready():
            return  # mostly so, and a timer costs more than the question
        try:
            async with asyncio.timeout(self._remaining_s()):
                while not ready():
                    self._changed.clear()
                    await self._changed.wait()
                    self._raise_problem()
        except TimeoutError:
            raise TransferExpired(f"transfer {self._opening.transfer_id} was not complete in time") from None

    def _raise_problem(self) -> None:
        if self._error:
            raise self._error
        for post in self._posts[self._placed :]:
            if post.operation.error:
                raise post.operation.error
        if self._voided:
            raise TransferAborted("the sender gave the transfer up")
