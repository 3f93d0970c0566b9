"""How many pieces of one transfer a sender has gathered or on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from kvtransfer import (
    Accepted,
    Acknowledge,
    Arena,
    KvLayout,
    MemoryTransport,
    Message,
    Open,
    Posted,
    Sender,
    plan_pieces,
)
from kvtransfer import sender as sender_module
from kvtransfer.messages import Sent

T = TypeVar("T")

INCARNATION = "a" * 16
LAYOUT = KvLayout(model="m", dtype="bf16", layers=3, kv_heads=2, head_dim=16, block_tokens=16)
TOKENS = 5 * 128
BLOCKS = TOKENS // LAYOUT.block_tokens


class CopiesAtOnce:
    """Copies without a thread: so many turns of the event loop then take the sender as far as it can go."""

    def __init__(self, name: str) -> None: ...

    async def run(self, copy: Callable[[], T]) -> T:
        return copy()

    def close(self) -> None: ...


class Said:
    """The sender's control stream: keeps what it says, and tells it what the test wants."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.told: asyncio.Queue[Message] = asyncio.Queue()

    async def send(self, message: Message) -> None:
        self.said.append(message)

    async def receive(self) -> Message | None:
        return await self.told.get()

    async def close(self) -> None: ...
    async def aclose(self) -> None: ...

    async def sent(self) -> list[int]:
        """Pieces said to be sent, once the sender waits."""
        for _ in range(100):
            await asyncio.sleep(0)
        return [message.piece for message in self.said if isinstance(message, Sent)]


async def test_two_pieces_are_in_flight_and_each_that_lands_lets_one_more_leave(monkeypatch: pytest.MonkeyPatch):
    """All are computed, posted and could be gathered: a third would cost staging memory and gain nothing."""
    monkeypatch.setattr(sender_module, "CopyThread", CopiesAtOnce)
    transport = MemoryTransport(INCARNATION)
    await transport.start()
    sender = Sender(transport, Arena(LAYOUT, BLOCKS), incarnation=INCARNATION)
    offer = sender.offer("t", TOKENS, range(BLOCKS), 60.0, lambda _: None)
    offer.advance(TOKENS)
    offer.finish(1)
    control = Said()
    serving = asyncio.ensure_future(sender.serve(control, 60.0))
    endpoint = await transport.connect(transport.address, 5.0)
    pieces = plan_pieces(LAYOUT, LAYOUT, TOKENS)
    opening = Open(
        transfer_id="t",
        sender_incarnation=INCARNATION,
        receiver_incarnation=INCARNATION,
        layout=LAYOUT,
        skip_tokens=0,
    )
    control.told.put_nowait(opening)
    control.told.put_nowait(Posted(pieces=len(pieces)))
    assert await control.sent() == [0, 1]
    accepted = control.said[0]
    assert isinstance(accepted, Accepted)
    for piece in pieces:
        assert sender.staging_out == min(2, len(pieces) - piece.index)
        endpoint.receive(np.zeros(piece.bytes, np.uint8), accepted.tag_base + piece.index)
        assert await control.sent() == list(range(min(len(pieces), piece.index + 3)))
    control.told.put_nowait(Acknowledge(bytes=accepted.bytes))
    await asyncio.wait_for(serving, 5.0)
    assert sender.staging_out == 0
    await sender.aclose()
    await transport.aclose()
