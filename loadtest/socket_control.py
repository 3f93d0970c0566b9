"""A control stream over a TCP connection: one line of JSON for each message, for pairs of processes without gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Final, cast

from kvtransfer.errors import PeerLost, ProtocolViolation, TransferError
from kvtransfer.layout import KvLayout
from kvtransfer.messages import Accepted, Acknowledge, Finished, Message, Open, Posted, Sent

_KINDS: Final[dict[str, Callable[..., object]]] = {
    each.__name__: each for each in (KvLayout, Open, Posted, Acknowledge, Accepted, Sent, Finished)
}
_ERRORS: Final = {each.__name__: each for each in TransferError.__subclasses__()}
_END: Final = "end"


class SocketControl:
    """One end of a connection; see Control."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._closed = False

    async def send(self, message: Message) -> None:
        """See Control."""
        if self._closed or self._writer.is_closing():
            raise PeerLost("the control connection is closed")
        self._say(_to_plain(message))

    async def receive(self) -> Message | None:
        """See Control."""
        try:
            line = await self._reader.readline()
        except OSError as error:
            raise PeerLost(f"the control connection broke: {error}") from error
        if not line.endswith(b"\n"):
            raise PeerLost("the control connection ended")
        said = json.loads(line)
        if said == _END:
            return None
        if "error" in said:
            raise _ERRORS.get(said["error"], TransferError)(said["text"])
        return cast("Message", _from_plain(said))

    async def close(self) -> None:
        """See Control."""
        if not self._closed:
            self._closed = True
            self._say(_END)

    async def aclose(self) -> None:
        """See Control."""
        await self.close()
        self._writer.close()

    def fail(self, error: TransferError) -> None:
        """Ends the stream with an error, which the peer's `receive` raises."""
        if not self._closed:
            self._closed = True
            self._say({"error": type(error).__name__, "text": str(error)})

    def _say(self, plain: object) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(plain).encode() + b"\n")


def _to_plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {"kind": type(value).__name__, **{name: _to_plain(_field(value, name)) for name in names}}
    if isinstance(value, bytes):
        return {"kind": "bytes", "hex": value.hex()}
    if isinstance(value, tuple):
        return [_to_plain(each) for each in value]
    return value


def _field(value: object, name: str) -> object:
    return object.__getattribute__(value, name)


def _from_plain(plain: object) -> object:
    if isinstance(plain, list):
        return tuple(_from_plain(each) for each in plain)
    if not isinstance(plain, dict):
        return plain
    values = {name: _from_plain(each) for name, each in plain.items() if name != "kind"}
    if plain["kind"] == "bytes":
        return bytes.fromhex(plain["hex"])
    if plain["kind"] not in _KINDS:
        raise ProtocolViolation(f"there is no message {plain['kind']!r}")
    return _KINDS[plain["kind"]](**values)
