"""kvtransfer's control channel over the gRPC stream KvTransferService.Pull, from both ends; its messages as protos."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
import grpc.aio
from diptych.v1 import kv_transfer_pb2 as pb
from diptych.v1 import worker_pb2

from kvtransfer.codec import Encoding
from kvtransfer.compression import Allowed
from kvtransfer.errors import (
    PeerLost,
    ProtocolViolation,
    TransferAborted,
    TransferError,
    TransferExpired,
    TransferUsed,
    UnknownTransfer,
)
from kvtransfer.messages import Accepted, Acknowledge, Finished, Message, Open, Posted, Sent
from services.rpc.convert import to_duration, to_seconds
from services.worker.convert import finish_named, from_finish, from_layout, to_finish, to_layout

PullCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.PullRequest, pb.PullResponse]"

_ERRORS: dict[grpc.StatusCode, type[TransferError]] = {
    grpc.StatusCode.NOT_FOUND: UnknownTransfer,
    grpc.StatusCode.FAILED_PRECONDITION: TransferUsed,
    grpc.StatusCode.ABORTED: TransferAborted,
    grpc.StatusCode.CANCELLED: TransferAborted,
    grpc.StatusCode.DEADLINE_EXCEEDED: TransferExpired,
    grpc.StatusCode.UNAVAILABLE: PeerLost,
}

_TO_ENCODING: dict[Encoding, pb.KvEncoding.ValueType] = {
    "plain": pb.KV_ENCODING_UNSPECIFIED,
    "int8": pb.KV_ENCODING_INT8,
    "fp8": pb.KV_ENCODING_FP8,
}
_FROM_ENCODING = {value: encoding for encoding, value in _TO_ENCODING.items()}


class ServingControl:
    """The sender's end: the servicer yields what `outgoing` gives."""

    def __init__(self, requests: AsyncIterator[pb.PullRequest]) -> None:
        self._requests = requests
        self._queue: asyncio.Queue[pb.PullResponse | None] = asyncio.Queue()
        self._closed = False

    async def send(self, message: Message) -> None:
        """See Control."""
        if self._closed:
            raise PeerLost("the pull's stream is closed")
        self._queue.put_nowait(to_response(message))

    async def receive(self) -> Message | None:
        """See Control. A stream that breaks ends like one that says no more: the peer is gone either way."""
        try:
            return from_request(await anext(self._requests))
        except (StopAsyncIteration, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return None

    async def close(self) -> None:
        """See Control."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)

    async def aclose(self) -> None:
        """See Control."""
        await self.close()

    async def outgoing(self) -> AsyncIterator[pb.PullResponse]:
        """Messages to yield, until closed."""
        while (message := await self._queue.get()) is not None:
            yield message


class CallingControl:
    """The receiver's end, over the client's call."""

    def __init__(self, call: PullCall, sender: worker_pb2.WorkerRef) -> None:
        self._call = call
        self._sender = sender
        # A read of its own task: cancelling a call's pending read would cancel the call.
        self._heard: asyncio.Queue[Message | TransferError | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(), name="pull-read")

    async def send(self, message: Message) -> None:
        """See Control."""
        try:
            await self._call.write(to_request(message, self._sender))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._failure() from error

    async def receive(self) -> Message | None:
        """See Control."""
        heard = await self._heard.get()
        if isinstance(heard, TransferError):
            raise heard
        return heard

    async def close(self) -> None:
        """See Control."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the call is over already
            await self._call.done_writing()

    async def aclose(self) -> None:
        """See Control."""
        self._call.cancel()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        try:
            while isinstance(message := await self._call.read(), pb.PullResponse):  # else it is grpc.aio.EOF
                self._heard.put_nowait(from_response(message))
            self._heard.put_nowait(None)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):  # the call's end
            self._heard.put_nowait(await self._failure())
        except TransferError as error:
            self._heard.put_nowait(error)

    async def _failure(self) -> TransferError:
        code, details = await self._call.code(), await self._call.details()
        return _ERRORS.get(code, TransferError)(f"{self._sender.name}: {details or code.name}")


def to_request(message: Message, sender: worker_pb2.WorkerRef) -> pb.PullRequest:
    """The receiver's messages as protos."""
    match message:
        case Open():
            return pb.PullRequest(
                open=pb.PullOpen(
                    transfer_id=message.transfer_id,
                    sender=sender,
                    receiver_incarnation=message.receiver_incarnation,
                    layout=to_layout(message.layout),
                    skip_tokens=message.skip_tokens,
                    encodings=map(_TO_ENCODING.__getitem__, message.allowed.encodings),
                    link_bytes_per_s=message.allowed.link_bytes_per_s,
                    only_if_slower=message.allowed.only_if_slower,
                )
            )
        case Posted(pieces=pieces):
            return pb.PullRequest(posted=pb.PullPosted(pieces=pieces))
        case Acknowledge(bytes=count):
            return pb.PullRequest(acknowledge=pb.PullAcknowledge(bytes=count))
        case _:
            raise ProtocolViolation(f"a receiver never says {type(message).__name__}")


def from_request(request: pb.PullRequest) -> Message:
    """Protos as the receiver's messages. ProtocolViolation for an empty one."""
    match request.WhichOneof("message"):
        case "open":
            return Open(
                transfer_id=request.open.transfer_id,
                sender_incarnation=request.open.sender.incarnation,
                receiver_incarnation=request.open.receiver_incarnation,
                layout=from_layout(request.open.layout),
                skip_tokens=request.open.skip_tokens,
                allowed=_allowed(request.open),
            )
        case "posted":
            return Posted(pieces=request.posted.pieces)
        case "acknowledge":
            return Acknowledge(bytes=request.acknowledge.bytes)
        case _:
            raise ProtocolViolation("an empty message")


def to_response(message: Message) -> pb.PullResponse:
    """The sender's messages as protos."""
    match message:
        case Accepted():
            return pb.PullResponse(
                accepted=pb.PullAccepted(
                    tokens=message.tokens,
                    pieces=message.pieces,
                    bytes=message.bytes,
                    layout=to_layout(message.layout),
                    data_address=message.data_address,
                    transport=message.transport,
                    tag_base=message.tag_base,
                    encoding=_TO_ENCODING[message.encoding],
                )
            )
        case Sent():
            return pb.PullResponse(sent=pb.PullSent(piece=message.piece, bytes=message.bytes, crc32=message.crc32))
        case Finished():
            return pb.PullResponse(
                finished=pb.PullFinished(
                    first_token_id=message.first_token_id,
                    finish_reason=to_finish(finish_named(message.finished)),
                    since_computed=to_duration(message.since_computed_s),
                )
            )
        case _:
            raise ProtocolViolation(f"a sender never says {type(message).__name__}")


def from_response(response: pb.PullResponse) -> Message:
    """Protos as the sender's messages. ProtocolViolation for an empty one."""
    match response.WhichOneof("message"):
        case "accepted":
            accepted = response.accepted
            if accepted.encoding not in _FROM_ENCODING:
                raise ProtocolViolation(f"encoding {accepted.encoding} is not known here")
            return Accepted(
                tokens=accepted.tokens,
                pieces=accepted.pieces,
                bytes=accepted.bytes,
                layout=from_layout(accepted.layout),
                data_address=accepted.data_address,
                transport=accepted.transport,
                tag_base=accepted.tag_base,
                encoding=_FROM_ENCODING[accepted.encoding],
            )
        case "sent":
            sent = response.sent
            return Sent(piece=sent.piece, bytes=sent.bytes, crc32=sent.crc32 if sent.HasField("crc32") else None)
        case "finished":
            finished = response.finished
            return Finished(
                first_token_id=finished.first_token_id,
                finished=from_finish(finished.finish_reason),
                since_computed_s=to_seconds(finished.since_computed),
            )
        case _:
            raise ProtocolViolation("an empty message")


def _allowed(opening: pb.PullOpen) -> Allowed:
    try:
        return Allowed(
            encodings=tuple(_FROM_ENCODING[each] for each in opening.encodings if each in _FROM_ENCODING),
            link_bytes_per_s=opening.link_bytes_per_s,
            only_if_slower=opening.only_if_slower,
        )
    except ValueError as error:
        raise ProtocolViolation(str(error)) from error
