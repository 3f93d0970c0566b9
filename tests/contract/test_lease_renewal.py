"""How long KV is kept for a receiver that has not come yet. No wire is needed for that, so over memory alone."""

from __future__ import annotations

import asyncio

import pytest
from kv_pairs import RECEIVER, Pair, pair_over, until

from kvtransfer import MemoryTransport, TransferAborted, TransferUsed, UnknownTransfer

LEASE_S = 0.1
TOKENS = 20


@pytest.fixture
async def pair():
    transport = MemoryTransport(RECEIVER)
    await transport.start()
    async with pair_over(transport, transport) as pair:
        yield pair
    await transport.aclose()


def promised(pair: Pair, *, limit_s: float = 20.0, lease_s: float = LEASE_S):
    """An offer whose lease is shorter than its limit."""
    pair.fill("t", TOKENS)

    def on_released(which: str) -> None:
        pair.released.append(which)
        pair.source.pool.free(which)

    return pair.sender.offer("t", TOKENS, pair.source.pool.blocks("t"), limit_s, on_released, lease_s=lease_s)


async def renewed(pair: Pair, times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(LEASE_S / 3)
        assert 0 < pair.sender.renew("t", LEASE_S) <= LEASE_S


async def test_the_kv_of_a_receiver_that_died_before_its_pull_is_free_when_the_lease_ends(pair):
    promised(pair)
    await until(lambda: pair.released == ["t"], timeout_s=5.0)
    assert pair.source.pool.counts().free == pair.source.pool.counts().total
    with pytest.raises(UnknownTransfer, match="expired"):
        pair.sender.renew("t", LEASE_S)
    with pytest.raises(UnknownTransfer, match="expired"):
        await pair.pull("t", TOKENS)


async def test_a_receiver_that_waits_keeps_its_hand_off_beyond_the_lease_and_can_pull_it(pair):
    offer = promised(pair)
    await renewed(pair, 9)
    assert pair.released == []
    pull = asyncio.ensure_future(pair.pull("t", TOKENS))
    offer.advance(TOKENS)
    offer.finish(7)
    assert (await pull).first_token_id == 7
    assert pair.released == ["t"]


async def test_a_receiver_that_stops_renewing_keeps_it_no_longer_than_the_lease(pair):
    promised(pair)
    await renewed(pair, 6)
    await until(lambda: pair.released == ["t"], timeout_s=5.0)


async def test_no_renewal_outlives_the_limit(pair):
    promised(pair, limit_s=0.3)
    assert pair.sender.renew("t", 60.0) <= 0.3
    await until(lambda: pair.released == ["t"], timeout_s=5.0)


async def test_a_renewal_never_shortens(pair):
    promised(pair, lease_s=10.0)
    assert pair.sender.renew("t", LEASE_S) > 9.0


async def test_a_pull_that_runs_is_held_by_its_limit_alone(pair):
    offer = promised(pair)
    pull = asyncio.ensure_future(pair.pull("t", TOKENS))
    await until(lambda: bool(pair.controls and pair.controls[0][1].said))  # accepted
    assert pair.sender.renew("t", LEASE_S) > 10.0
    await asyncio.sleep(3 * LEASE_S)
    offer.advance(TOKENS)
    offer.finish(7)
    assert (await pull).first_token_id == 7


async def test_a_renewal_before_the_offer_is_nothing_and_no_error(pair):
    assert pair.sender.renew("t", LEASE_S) == 0.0
    promised(pair)
    assert pair.sender.renew("t", LEASE_S) > 0.0


async def test_a_renewal_of_what_is_over_says_how_it_ended(pair):
    promised(pair)
    pair.sender.release("t")
    with pytest.raises(TransferAborted, match="released"):
        pair.sender.renew("t", LEASE_S)
    pair.fill("u", TOKENS)
    offer = pair.offer("u", TOKENS)
    offer.advance(TOKENS)
    offer.finish(3)
    await pair.pull("u", TOKENS)
    with pytest.raises(TransferUsed):
        pair.sender.renew("u", LEASE_S)
