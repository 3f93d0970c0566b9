"""The control stream over a socket: what is said arrives as it is, and every kind of end is told apart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from kv_pairs import LAYOUT, RECEIVER, SENDER

from kvtransfer import (
    Accepted,
    Acknowledge,
    Arena,
    Finished,
    KvLayout,
    MemoryTransport,
    Open,
    PeerLost,
    Posted,
    ProtocolViolation,
    Receiver,
    Sender,
    Sent,
    StreamControl,
    UnknownTransfer,
    serve_stream,
)

SAID = [
    Open(transfer_id="größe", sender_incarnation=SENDER, receiver_incarnation=RECEIVER, layout=LAYOUT, skip_tokens=16),
    Posted(pieces=4),
    Acknowledge(bytes=1 << 40),
    Accepted(
        tokens=7,
        pieces=3,
        bytes=1 << 33,
        layout=KvLayout(
            model="m", dtype="fp32", layers=4, kv_heads=8, head_dim=2, block_tokens=1, layer_begin=1, head_end=3
        ),
        data_address=b"\0\xff\n",
        transport="ucx",
        tag_base=(1 << 63) - 1,
    ),
    Sent(piece=0, bytes=0),
    Sent(piece=2, bytes=5, crc32=(1 << 32) - 1),
    Finished(first_token_id=1, finished=None, since_computed_s=0.25),
    Finished(first_token_id=1, finished="stop", since_computed_s=0.0),
]


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[StreamControl, StreamControl]]:
    """The two ends of a TCP connection."""
    accepted: asyncio.Queue[StreamControl] = asyncio.Queue()
    server = await asyncio.start_server(lambda *ends: accepted.put_nowait(StreamControl(*ends)), "127.0.0.1", 0)
    here = StreamControl(*await asyncio.open_connection(*server.sockets[0].getsockname()))
    there = await accepted.get()
    try:
        async with asyncio.timeout(5):
            yield here, there
    finally:
        await here.aclose()
        await there.aclose()
        server.close()


async def test_every_message_arrives_as_it_was_said() -> None:
    async with connected() as (here, there):
        for message in SAID:
            await here.send(message)
            assert await there.receive() == message


async def test_a_half_closed_stream_ends_one_direction_and_keeps_the_other() -> None:
    async with connected() as (here, there):
        await here.send(Posted(pieces=1))
        await here.close()
        await here.close()
        assert [await there.receive(), await there.receive()] == [Posted(pieces=1), None]
        await there.send(Sent(piece=0, bytes=3))
        assert await here.receive() == Sent(piece=0, bytes=3)
        with pytest.raises(PeerLost):
            await here.send(Posted(pieces=2))


async def test_what_the_peer_failed_with_is_raised_as_that() -> None:
    async with connected() as (here, there):
        await there.fail(UnknownTransfer("transfer t expired"))
        with pytest.raises(UnknownTransfer, match="transfer t expired"):
            await here.receive()
        assert await here.receive() is None


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"null\n",
        b"[]\n",
        b"{}\n",
        b'{"type": "Order"}\n',
        b'{"type": "Posted"}\n',
        b'{"type": "Posted", "pieces": 1, "x": 1}\n',
        b'{"type": "PeerLost"}\n',
        b"\xff\n",
    ],
)
async def test_a_line_that_is_no_message_is_a_violation(line: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(line)
    with pytest.raises(ProtocolViolation):
        await StreamControl(reader, None).receive()  # type: ignore[arg-type]


async def test_a_pull_over_a_socket_brings_the_kv_and_a_second_one_the_senders_error() -> None:
    transport = MemoryTransport(RECEIVER)
    await transport.start()
    source, target = Arena(LAYOUT, 2), Arena(LAYOUT, 2)
    source.array[...] = 7
    sender, receiver = Sender(transport, source, incarnation=SENDER), Receiver(transport, target)
    offer = sender.offer("t", 20, (0, 1), 5.0, lambda _: None)
    offer.advance(20)
    offer.finish(42)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve_stream(sender, reader, writer, timeout_s=5.0)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)

    async def pull() -> int:
        control = StreamControl(*await asyncio.open_connection(*server.sockets[0].getsockname()))
        opening = Open(
            transfer_id="t", sender_incarnation=SENDER, receiver_incarnation=RECEIVER, layout=LAYOUT, skip_tokens=0
        )
        return (await receiver.pull(control, opening, block_ids=(0, 1), tokens=20, timeout_s=5.0)).first_token_id

    assert await pull() == 42
    assert (target.array[:, :, 0] == 7).all()
    with pytest.raises(Exception, match="used before") as failed:
        await pull()
    assert type(failed.value).__name__ == "TransferUsed"
    server.close()
    await receiver.aclose()
    await sender.aclose()
    await transport.aclose()
