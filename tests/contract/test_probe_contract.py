"""What a probe of a connection does, over every transport."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import pytest_asyncio
from kv_pairs import RECEIVER, make_transport, pair_over, until

from kvtransfer import PeerLost, ProtocolViolation, TransferExpired, TruncatedPiece, probe

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["memory", "ucx"])
async def transport(request):
    """Both sides share one transport that talks to itself: UCX has one context in a process."""
    transport = make_transport(request.param, RECEIVER)
    await transport.start()
    yield transport
    await transport.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def pair(transport):
    async with pair_over(transport, transport) as pair:
        yield pair
        await pair.receiver.drained()
        assert pair.receiver.staging_out == pair.receiver.quarantined == 0


async def probed(pair, timeout_s: float = 5.0):
    """Both sides of one probe; what the receiver measured."""
    invitation = pair.sender.invite(RECEIVER)
    answering = asyncio.ensure_future(pair.sender.answer(invitation, timeout_s))
    try:
        return await pair.receiver.probe(invitation, timeout_s)
    finally:
        await asyncio.wait([answering])


async def test_a_probe_measures_and_leaves_nothing(pair, transport):
    before = transport.counters.bytes_received
    measured = await probed(pair)
    pieces, rest = divmod(measured.bytes, probe.PIECE_BYTES)
    assert rest == 0
    assert pieces in {1 + 2 * count for count in range(probe.WINDOW + 1)}, "two rounds, shorter ones on a busy machine"
    assert measured.bytes <= transport.counters.bytes_received - before < measured.bytes + 4096
    assert 0 < measured.round_trip_s < 1
    assert 1e7 < measured.bytes_per_s < 1e12
    assert measured.lanes == {"memory": "memory", "ucx": "tcp/lo"}[transport.name]
    await pair.receiver.drained()
    assert pair.receiver.staging_out == 0
    assert transport.counters.endpoints_aborted == 0


async def test_a_transfer_beside_probes_is_undisturbed(pair):
    kv = pair.fill("t", 1000)
    offer = pair.offer("t", 1000)
    pull = asyncio.ensure_future(pair.pull("t", 1000))
    probes = asyncio.gather(probed(pair), probed(pair))
    for chunk in (128, 500, 1000):
        offer.advance(chunk)
        await asyncio.sleep(0)
    offer.finish(7)
    assert (await pull).first_token_id == 7
    assert all(measured.bytes for measured in await probes)
    np.testing.assert_array_equal(pair.received("t", 1000), kv)


@pytest.mark.parametrize("place", [0, probe.PIECE_BYTES // 2, probe.PIECE_BYTES - 1])
async def test_a_byte_that_arrives_as_another_fails_the_probe(pair, monkeypatch, place):
    pattern = probe._pattern

    def damaged(seed):  # the sender, which is made first, sends one bit otherwise than the receiver expects it
        monkeypatch.setattr(probe, "_pattern", pattern)
        content = bytearray(pattern(seed))
        content[place] ^= 1
        return bytes(content)

    monkeypatch.setattr(probe, "_pattern", damaged)
    invitation = pair.sender.invite(RECEIVER)
    answering = asyncio.ensure_future(pair.sender.answer(invitation, 5.0))
    await asyncio.sleep(0)
    with pytest.raises(TruncatedPiece):
        await pair.receiver.probe(invitation, 5.0)
    await answering


async def test_a_sender_that_does_not_answer_is_given_up_at_the_deadline(pair, transport):
    invitation = pair.sender.invite(RECEIVER)
    with pytest.raises(TransferExpired):
        await pair.receiver.probe(invitation, 0.05)
    # The late sender finds what was said, the end of it too: nothing stays on the wire, and nobody is cut off.
    await pair.sender.answer(invitation, 5.0)
    await pair.receiver.drained()
    assert transport.counters.endpoints_aborted == 0


async def test_a_receiver_that_is_cancelled_ends_the_probe_of_the_sender_too(pair, transport):
    invitation = pair.sender.invite(RECEIVER)
    answering = asyncio.ensure_future(pair.sender.answer(invitation, 5.0))
    probing = asyncio.ensure_future(pair.receiver.probe(invitation, 5.0))
    await until(lambda: pair.receiver.staging_out > 0 or probing.done())
    probing.cancel()
    await asyncio.wait([probing])
    await answering
    await pair.receiver.drained()
    assert transport.counters.endpoints_aborted == 0


async def test_a_receiver_that_never_connects_is_a_lost_peer(pair):
    with pytest.raises(PeerLost):
        await pair.sender.answer(pair.sender.invite("f" * 16), 0.05)


@pytest.mark.parametrize("word", [(7, 1), (2, 0), (2, probe.WINDOW + 1)])
async def test_a_command_that_is_none_fails_the_sending_side(pair, transport, word):
    invitation = pair.sender.invite(RECEIVER)
    endpoint = await transport.connect(transport.address, 5.0)
    endpoint.send(np.array(word, np.uint8), invitation.tag_base)
    with pytest.raises(ProtocolViolation):
        await pair.sender.answer(invitation, 5.0)


async def test_a_probe_is_not_longer_than_its_table_of_tags(pair, transport):
    invitation = pair.sender.invite(RECEIVER)
    endpoint = await transport.connect(transport.address, 5.0)
    for index in range(64):
        endpoint.receive(np.zeros(2, np.uint8), invitation.tag_base + 64 + index)
        endpoint.send(np.array((1, 1), np.uint8), invitation.tag_base + index)
    with pytest.raises(ProtocolViolation):
        await pair.sender.answer(invitation, 5.0)
