"""What a faulty transport and faulty control streams do wrong, and that transfers over them stay right."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest
import pytest_asyncio
from kv_pairs import LAYOUT, RECEIVER, control_pair, make_transport, pair_over, until

from kvtransfer import (
    Accepted,
    Acknowledge,
    Finished,
    MemoryTransport,
    PeerLost,
    Posted,
    TransferAborted,
    TransferExpired,
    UnknownTransfer,
)
from kvtransfer.transport.fault import Fault, parse_fault
from kvtransfer.transport.faulty import FaultyControl, FaultyControls, FaultyTransport

pytestmark = pytest.mark.asyncio(loop_scope="module")

_tags = itertools.count(1 << 20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ucx():
    """UCX can be started once a process and then be wrapped in many ways."""
    transport = make_transport("ucx", RECEIVER)
    await transport.start()
    yield transport
    await transport.aclose()


@pytest_asyncio.fixture(loop_scope="module", params=["memory", "ucx"])
async def below(request, ucx):
    """A started transport to be wrapped."""
    if request.param == "ucx":
        yield ucx
        return
    transport = MemoryTransport(RECEIVER)
    await transport.start()
    yield transport
    await transport.aclose()


async def ends_over(below, text: str):
    transport = FaultyTransport(below, parse_fault(text))
    return transport, await transport.connect(transport.address, 5.0), await transport.endpoint_of(RECEIVER, 5.0)


async def exchange(sending, receiving, sizes) -> list[int]:
    """Sends messages of these sizes at once; returns the order of their arrival."""
    tags, order = [next(_tags) for _ in sizes], []
    for i, (size, tag) in enumerate(zip(sizes, tags, strict=True)):
        receiving.receive(np.zeros(size, np.uint8), tag).on_resolved(lambda i=i: order.append(i))
    await asyncio.gather(
        *(sending.send(np.ones(size, np.uint8), tag).wait(9.0) for size, tag in zip(sizes, tags, strict=True))
    )
    await until(lambda: len(order) == len(sizes))
    return order


async def test_a_rate_is_kept_over_many_messages(below):
    """Never faster than the link; how much slower is measured elsewhere, here a busy machine must not matter."""
    _, sending, receiving = await ends_over(below, "rate=1Gbit")
    begin_s = time.monotonic()
    await exchange(sending, receiving, [2_000_000] * 10)
    duration_s = time.monotonic() - begin_s
    assert 0.155 < duration_s < 2.0  # 160 ms of link, the last message up to 4 ms early


async def test_a_delay_moves_every_message_and_holds_none_up(below):
    _, sending, receiving = await ends_over(below, "delay=150ms")
    begin_s = time.monotonic()
    await exchange(sending, receiving, [1000] * 20)
    assert 0.15 <= time.monotonic() - begin_s < 1.5


async def test_reordered_messages_arrive_all_in_an_order_that_the_seed_decides():
    orders = []
    for seed in (1, 1, 2):
        below = MemoryTransport(RECEIVER)
        await below.start()
        transport, sending, receiving = await ends_over(below, f"reorder=500ms,seed={seed}")
        orders.append(await exchange(sending, receiving, [10] * 12))
        await transport.aclose()
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(12)) != orders[0]


@pytest.mark.parametrize(("fault", "whole"), [("cut-after=250000B", 2), ("cut-after=0B", 0), ("cut-after=199999B", 1)])
async def test_a_connection_breaks_on_both_sides_at_its_byte_and_the_next_one_lasts(below, fault, whole):
    transport, sending, receiving = await ends_over(below, fault)
    tags = [next(_tags) for _ in range(5)]
    receives = [receiving.receive(np.zeros(100_000, np.uint8), tag) for tag in tags]
    for i, tag in enumerate(tags):
        send = sending.send(np.full(100_000, 1 + i, np.uint8), tag)
        if i < whole:
            assert await send.wait(5.0) and await receives[i].wait(5.0)
        else:
            with pytest.raises(PeerLost):
                await send.wait(5.0)
    for receive in receives[whole:]:
        with pytest.raises(PeerLost):
            await receive.wait(5.0)
    await until(lambda: not sending.alive and not receiving.alive)
    assert transport.pending == 0
    again, other = await transport.connect(transport.address, 5.0), await transport.endpoint_of(RECEIVER, 5.0)
    assert await exchange(other, again, [100_000] * 3) == [0, 1, 2]


async def test_a_cut_in_a_message_spares_the_shorter_ones(below):
    _, sending, receiving = await ends_over(below, "cut-in=50kB")
    await exchange(sending, receiving, [50_000, 1, 50_000])
    receiving.receive(got := np.zeros(50_001, np.uint8), tag := next(_tags))
    with pytest.raises(PeerLost):
        await sending.send(np.ones(50_001, np.uint8), tag).wait(5.0)
    await until(lambda: not receiving.alive)
    assert not (got == 1).all()


async def fail_to_pull(pair):
    """A pull of 6,912,000 bytes as "t" breaks; everything is drained afterwards."""
    pair.fill("t", 300)
    offer = pair.offer("t", 300)
    offer.advance(300)
    offer.finish(1)
    with pytest.raises((PeerLost, TransferAborted)):
        await pair.pull("t", 300)
    await until(lambda: pair.released == ["t"])
    await pair.receiver.drained()


@pytest.mark.parametrize("fault", ["cut-after=3MB", "cut-in=1MB"])
async def test_a_cut_spares_the_probe_when_workers_meet_and_breaks_the_first_transfer(below, fault):
    """A probe moves tens of megabytes: the cut used to fall into it, before any KV had moved."""
    transport = FaultyTransport(below, parse_fault(fault))
    async with pair_over(transport, transport) as pair:
        invitation = pair.sender.invite(RECEIVER)
        answering = asyncio.ensure_future(pair.sender.answer(invitation, 9.0))
        measured = await pair.receiver.probe(invitation, 9.0)
        await answering
        assert measured.bytes > 3_000_000
        await fail_to_pull(pair)
    assert transport.pending == 0


async def test_a_receive_that_fails_has_been_written_to(below):
    _, sending, receiving = await ends_over(below, "")
    receive = receiving.receive(got := np.zeros(1000, np.uint8), next(_tags))
    await asyncio.sleep(0)
    await sending.abort()
    with pytest.raises(PeerLost):
        await receive.wait(5.0)
    assert got[:500].any()
    assert not got[500:-16].any()


async def test_messages_that_wait_for_the_link_fail_when_it_breaks():
    below = MemoryTransport(RECEIVER)
    await below.start()
    transport, sending, receiving = await ends_over(below, "rate=8kbit")
    sends = [sending.send(np.ones(100_000, np.uint8), next(_tags)) for _ in range(3)]  # 100 s each
    with pytest.raises(TransferExpired):
        await sends[0].wait(0.02)
    await receiving.abort()
    for send in sends:
        with pytest.raises(PeerLost):
            await send.wait(2.0)
    assert transport.pending == 0
    await transport.aclose()


@pytest.mark.parametrize("at", [0, 1, 200_000, 5_898_240])
async def test_a_transfer_that_is_cut_is_an_error_and_leaves_nothing_behind(below, at):
    """The KV that must not be touched lies in the blocks that the failed pull gave back."""
    transport = FaultyTransport(below, parse_fault(f"cut-after={at}B,rate=4Gbit"))
    async with pair_over(transport, transport) as pair:
        await fail_to_pull(pair)
        await until(lambda: transport.pending == 0)
        assert pair.receiver.staging_out == pair.sender.staging_out == 0
        assert pair.receiver.quarantined == pair.sender.quarantined == 0
        pair.target.pool.free("t")
        kv = pair.fill("u", 300, seed=2)
        offer = pair.offer("u", 300)
        offer.advance(300)
        offer.finish(2)
        await pair.pull("u", 300)
        np.testing.assert_array_equal(pair.received("u", 300), kv)


async def test_a_lost_acknowledgement_is_recovered_by_the_lease(below):
    """The receiver has its KV and may use it; the sender, who will never hear of it, frees its blocks by itself."""
    async with pair_over(below, below) as pair:
        kv = pair.fill("t", 20)
        offer = pair.offer("t", 20, limit_s=2.0)
        offer.advance(20)
        offer.finish(3)
        loses = FaultyControl(pair.start_serving(), lambda message: isinstance(message, Acknowledge), for_good=True)
        blocks = pair.target.pool.allocate(2, "t")
        await pair.receiver.pull(loses, pair.opening("t"), block_ids=blocks, tokens=20, timeout_s=5.0)
        assert pair.released == []
        np.testing.assert_array_equal(pair.received("t", 20), kv)
        await pair.served[0]
        assert pair.released == ["t"]
        with pytest.raises(UnknownTransfer, match="expired"):
            await pair.pull("t", 20, blocks=blocks)


async def test_a_receiver_whose_connection_is_gone_before_the_first_piece_holds_no_blocks(below):
    """The sender once waited five seconds for a connection, whatever its control stream said meanwhile.

    It waits for it when the stream ends: the connection it waits for can never come.
    """
    async with pair_over(below, below) as pair:
        pair.fill("t", 20)
        offer = pair.offer("t", 20)
        offer.advance(20)
        offer.finish(3)
        stream = pair.start_serving()
        await stream.send(pair.opening("t", receiver_incarnation="f" * 16))
        await stream.send(Posted(pieces=1))
        assert isinstance(await stream.receive(), Accepted)
        for _ in range(20):
            await asyncio.sleep(0)
        assert pair.released == []
        await stream.close()
        await until(lambda: pair.released == ["t"], timeout_s=1.0)


async def test_a_stream_loses_what_it_is_told_to_lose_and_goes_on():
    near, far = control_pair()
    control = FaultyControl(near, lambda message: isinstance(message, Posted))
    for message in (Posted(pieces=1), Acknowledge(bytes=2), Posted(pieces=3)):
        await control.send(message)
    await control.close()
    assert [await far.receive(), await far.receive()] == [Acknowledge(bytes=2), None]


async def test_a_dead_line_does_not_even_say_that_it_ends():
    near, far = control_pair()
    control = FaultyControl(near, lambda message: isinstance(message, Posted), for_good=True)
    for message in (Posted(pieces=1), Acknowledge(bytes=2)):
        await control.send(message)
    await control.close()
    await control.aclose()
    await far.send(Finished(first_token_id=1, finished=None, since_computed_s=0.0))
    assert isinstance(await control.receive(), Finished)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(far.receive(), 0.02)


async def test_the_first_acknowledgements_of_a_worker_are_dropped():
    controls, heard = FaultyControls(Fault(dropped_acknowledgements=2)), []
    for _ in range(4):
        near, far = control_pair()
        control = controls.over(near)
        for message in (Posted(pieces=1), Acknowledge(bytes=1)):
            await control.send(message)
        await control.close()
        heard.append([await far.receive() for _ in range(len(near.said) + 1)])
    assert [len(each) for each in heard] == [2, 2, 3, 3]
    assert LAYOUT.token_bytes == 23_040  # what the byte counts above are made of
