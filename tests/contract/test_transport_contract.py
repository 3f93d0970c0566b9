"""What every transport must do."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import pytest_asyncio
from kv_pairs import SLOW, make_transport

from kvtransfer import PeerLost, TransferExpired, TransportUnavailable, TruncatedPiece

pytestmark = pytest.mark.asyncio(loop_scope="module")

INCARNATION = "c0417ac7" + "0" * 8
SIZES = [1, 8191, 8192, 3 << 20]
_tags = iter(range(1 << 20, 1 << 30))


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["memory", "ucx", "faulty: memory", "faulty: ucx", SLOW]
)
async def transport(request):
    """One transport that talks to itself: UCX has one context in a process."""
    transport = make_transport(request.param, INCARNATION)
    with pytest.raises(TransportUnavailable):
        _ = transport.address
    await transport.start()
    yield transport
    await transport.aclose()
    await transport.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def ends(transport):
    """(the connecting, the listening) end of a fresh connection."""
    connecting = await transport.connect(transport.address, 5.0)
    listening = await transport.endpoint_of(INCARNATION, 5.0)
    yield connecting, listening
    await connecting.abort()
    await listening.abort()


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", SIZES)
async def test_a_posted_receive_gets_exactly_the_bytes(ends, size):
    connecting, listening = ends
    tag, sent, got = next(_tags), random_bytes(size), np.zeros(size, np.uint8)
    receive = connecting.receive(got, tag)
    assert await listening.send(sent, tag).wait(5.0)
    assert await receive.wait(5.0)
    assert receive.filled
    np.testing.assert_array_equal(got, sent)


@pytest.mark.parametrize("size", SIZES)
async def test_a_send_before_its_receive_is_not_lost(ends, size):
    connecting, listening = ends
    tag, sent, got = next(_tags), random_bytes(size), np.zeros(size, np.uint8)
    send = listening.send(sent, tag)
    await asyncio.sleep(0)
    assert await connecting.receive(got, tag).wait(5.0)
    assert await send.wait(5.0)
    np.testing.assert_array_equal(got, sent)


async def test_messages_go_where_their_tags_say_in_any_order(ends):
    connecting, listening = ends
    tags = [next(_tags) for _ in range(8)]
    buffers = [np.zeros(70_000, np.uint8) for _ in tags]
    receives = [connecting.receive(buffer, tag) for buffer, tag in zip(buffers, tags, strict=True)]
    sends = [listening.send(np.full(70_000, i, np.uint8), tags[i]) for i in reversed(range(8))]
    for operation in (*receives, *sends):
        assert await operation.wait(5.0)
    assert [int(buffer[0]) for buffer in buffers] == [int(buffer[-1]) for buffer in buffers] == list(range(8))


async def test_both_directions_work(ends):
    connecting, listening = ends
    tag, got = next(_tags), np.zeros(3, np.uint8)
    receive = listening.receive(got, tag)
    await connecting.send(np.array([1, 2, 3], np.uint8), tag).wait(5.0)
    await receive.wait(5.0)
    assert got.tolist() == [1, 2, 3]


@pytest.mark.parametrize("size", [1, 999, 70_000, 99_984])
async def test_a_shorter_message_completes_without_filling(ends, size):
    connecting, listening = ends
    tag = next(_tags)
    receive = connecting.receive(np.zeros(100_000, np.uint8), tag)
    await listening.send(np.ones(size, np.uint8), tag).wait(5.0)
    assert await receive.wait(5.0) is False
    assert not receive.filled
    assert receive.error is None


async def test_a_longer_message_is_an_error(ends):
    connecting, listening = ends
    tag = next(_tags)
    receive = connecting.receive(np.zeros(100, np.uint8), tag)
    listening.send(np.ones(101, np.uint8), tag)
    with pytest.raises(TruncatedPiece):
        await receive.wait(5.0)


async def test_waiting_in_vain_neither_cancels_the_receive_nor_loses_the_message(ends):
    connecting, listening = ends
    tag, got = next(_tags), np.zeros(70_000, np.uint8)
    receive = connecting.receive(got, tag)
    with pytest.raises(TransferExpired):
        await receive.wait(0.01)
    waiting = asyncio.ensure_future(receive.wait(5.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not receive.resolved
    await listening.send(np.ones(70_000, np.uint8), tag).wait(5.0)
    assert await receive.wait(5.0)
    assert got.all()


async def test_an_abort_fails_what_is_pending_and_a_new_connection_works(transport, ends):
    connecting, listening = ends
    receive = connecting.receive(np.zeros(100, np.uint8), next(_tags))
    await asyncio.sleep(0)
    await connecting.abort()
    with pytest.raises(PeerLost):
        await receive.wait(5.0)
    assert not connecting.alive
    with pytest.raises(PeerLost):
        await connecting.receive(np.zeros(100, np.uint8), next(_tags)).wait(5.0)
    again = await transport.connect(transport.address, 5.0)
    assert again is not connecting
    other, tag = await transport.endpoint_of(INCARNATION, 5.0), next(_tags)
    assert other is not listening
    receive = again.receive(np.zeros(10, np.uint8), tag)
    await other.send(np.ones(10, np.uint8), tag).wait(5.0)
    assert await receive.wait(5.0)


async def test_an_abort_reaches_the_peer(ends):
    connecting, listening = ends
    receive = connecting.receive(np.zeros(100, np.uint8), next(_tags))
    await asyncio.sleep(0)
    await listening.abort()
    with pytest.raises(PeerLost):
        await receive.wait(5.0)


async def test_connections_are_kept(transport, ends):
    assert await transport.connect(transport.address, 5.0) is ends[0]


async def test_nobody_is_found_at_foreign_addresses(transport):
    for address in (b"", b"nonsense", transport.address[:-1], transport.address + b"x"):
        with pytest.raises(PeerLost):
            await transport.connect(address, 5.0)


async def test_a_peer_that_has_not_connected_is_not_waited_for_beyond_the_timeout(transport):
    with pytest.raises(PeerLost):
        await transport.endpoint_of("f" * 16, 0.05)


async def test_whole_messages_are_counted(transport, ends):
    connecting, listening = ends
    before = transport.counters.bytes_received, transport.counters.bytes_sent
    tag = next(_tags)
    receive = connecting.receive(np.zeros(12_345, np.uint8), tag)
    await listening.send(np.ones(12_345, np.uint8), tag).wait(5.0)
    await receive.wait(5.0)
    assert transport.counters.bytes_received - before[0] == 12_345
    assert transport.counters.bytes_sent - before[1] == 12_345
