"""A Control over a pair of asyncio streams, a socket's for example: for peers that have no RPC library between them.

One JSON line a message; the end of the lines is the end of the stream. `serve_stream` is what a server does with each
connection that comes in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final, get_args

from kvtransfer import errors
from kvtransfer.compression import Allowed
from kvtransfer.errors import PeerLost, ProtocolViolation, TransferError
from kvtransfer.layout import KvLayout
from kvtransfer.messages import Message
from kvtransfer.sender import Sender

_MESSAGES: Final[dict[str, type[Message]]] = {kind.__name__: kind for kind in get_args(Message)}
_ERRORS: Final[dict[str, type[TransferError]]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TransferError)
}


class StreamControl:
    """See Control. `fail` ends the stream with an error, which the peer's `receive` raises."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._closed = False

    async def send(self, message: Message) -> None:
        """See Control."""
        await self._write(type(message).__name__, asdict(message))

    async def receive(self) -> Message | None:
        """See Control."""
        try:
            line = await self._reader.readline()
        except ConnectionError as error:
            raise PeerLost(f"the control stream is broken: {error}") from error
        return _parse(line) if line else None

    async def fail(self, error: TransferError) -> None:
        """Tells the peer what the transfer failed with, and says no more. Never raises."""
        with contextlib.suppress(PeerLost):
            await self._write(type(error).__name__, {"reason": str(error)})
        await self.close()

    async def close(self) -> None:
        """See Control."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._writer.write_eof()

    async def aclose(self) -> None:
        """See Control."""
        self._closed = True
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _write(self, kind: str, values: Mapping[str, object]) -> None:
        if self._closed:
            raise PeerLost("the control stream is closed")
        try:
            self._writer.write(json.dumps({"type": kind, **values}, default=bytes.hex).encode() + b"\n")
            await self._writer.drain()
        except ConnectionError as error:
            raise PeerLost(f"the control stream is broken: {error}") from error


async def serve_stream(
    sender: Sender, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, timeout_s: float
) -> None:
    """Serves one pull over one connection, to its end, and closes it; the receiver is told what it failed with."""
    control = StreamControl(reader, writer)
    try:
        await sender.serve(control, timeout_s)
    except TransferError as error:
        await control.fail(error)
    finally:
        await control.aclose()


def _parse(line: bytes) -> Message:
    """Raises the error that the line carries; ProtocolViolation when it is no line of ours."""
    try:
        values = json.loads(line)
        kind = values.pop("type")
        if kind in _ERRORS:
            raise _ERRORS[kind](values["reason"])
        if "layout" in values:
            values["layout"] = KvLayout(**values["layout"])
        if "allowed" in values:
            encodings = tuple(values["allowed"].pop("encodings"))
            values["allowed"] = Allowed(encodings=encodings, **values["allowed"])
        if "data_address" in values:
            values["data_address"] = bytes.fromhex(values["data_address"])
        return _MESSAGES[kind](**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProtocolViolation(f"{line[:80]!r} is no message: {error!r}") from error
