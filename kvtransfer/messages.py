"""The control messages of one transfer, and the channel that carries them.

Receiver: Open, Posted…, Acknowledge. Sender: Accepted, Sent…, Finished. The KV bytes never travel here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvtransfer.codec import Encoding
from kvtransfer.compression import PLAIN_ONLY, Allowed
from kvtransfer.layout import KvLayout

Address = bytes
"""Where a data plane can be reached; opaque to everyone but the transport."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """First word of the receiver. `layout` is the receiver's; tokens [0, skip_tokens) are there already. `allowed`: how
    the KV may be encoded.
    """

    transfer_id: str
    sender_incarnation: str
    receiver_incarnation: str
    layout: KvLayout
    skip_tokens: int
    allowed: Allowed = PLAIN_ONLY


@dataclass(frozen=True, kw_only=True, slots=True)
class Posted:
    """Pieces [0, pieces) have a posted receive now."""

    pieces: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledge:
    """Everything arrived and is in place. `bytes` is what arrived, as a check."""

    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """First word of the sender: its manifest, and where its data plane is. Piece i carries the tag tag_base + i.
    `bytes` are those of all messages, as `encoding` makes them.
    """

    tokens: int
    pieces: int
    bytes: int
    layout: KvLayout
    data_address: Address
    transport: str
    tag_base: int
    encoding: Encoding = "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A piece is leaving. `bytes` 0: the transfer is being given up; nothing but void messages, for what is posted,
    follows. `crc32`: see copying.checksum; None where the sender does not compute it.
    """

    piece: int
    bytes: int
    crc32: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Last word of the sender. `finished` (opaque) is set when the request ended with its first token; pieces for
    which no Sent came before it are void then.

    `since_computed_s`: how long ago the last KV of the transfer had been computed.
    """

    first_token_id: int
    finished: str | None
    since_computed_s: float


FromReceiver = Open | Posted | Acknowledge
FromSender = Accepted | Sent | Finished
Message = FromReceiver | FromSender


class Control(Protocol):
    """A bidirectional, ordered stream of messages to the peer; its end is the transfer's end.

    One task sends and one task receives at a time. Errors are TransferErrors: what the peer failed with, where the
    stream carries that, else PeerLost.
    """

    async def send(self, message: Message) -> None:
        """Queues one message for the peer. PeerLost: the stream is broken."""

    async def receive(self) -> Message | None:
        """The peer's next message; None when it will say no more. May be cancelled, but only when the transfer is
        over.
        """

    async def close(self) -> None:
        """Says no more, after everything sent so far was delivered: a half-close, not a cancel. Idempotent, never
        raises.
        """

    async def aclose(self) -> None:
        """Ends the stream in both directions and frees it. Idempotent, never raises."""
