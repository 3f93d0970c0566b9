"""Hand-offs between workers that are cut in different ways, over every transport."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import pytest_asyncio
from kv_pairs import LAYOUT, QueueControl, control_pair, make_transport, until

from kvtransfer import (
    Area,
    Arena,
    KvLayout,
    LayoutMismatch,
    Open,
    Received,
    Receiver,
    Sender,
    TransferAborted,
    TransferError,
    TransferExpired,
    TransferUsed,
    Transport,
    overlapping,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

# All share one transport that talks to itself, so all receivers have its incarnation; senders need none of a transport.
INCARNATION = "4ece17e4" + "0" * 8
BLOCKS = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["memory", "ucx"])
async def transport(request):
    transport = make_transport(request.param, INCARNATION)
    await transport.start()
    yield transport
    await transport.aclose()


def cut(stages: int, degree: int, block_tokens: int, replicas: int = 1) -> list[KvLayout]:
    """The model in `stages` ranges of layers, each in `degree` ranges of heads, each held by `replicas` workers."""
    edges = [[size * i // parts for i in range(parts + 1)] for size, parts in ((30, stages), (3, degree))]
    return [
        dataclasses.replace(
            LAYOUT,
            block_tokens=block_tokens,
            layer_begin=edges[0][stage],
            layer_end=edges[0][stage + 1],
            head_begin=edges[1][rank],
            head_end=edges[1][rank + 1],
        )
        for stage in range(stages)
        for rank in range(degree)
        for _ in range(replicas)
    ]


@dataclass
class Group:
    """All sending and all receiving shards of one model, and one hand-off between them."""

    arenas: list[Arena]
    senders: list[Sender]
    receivers: list[tuple[Arena, Receiver]]
    incarnations: list[str]
    released: list[int] = field(default_factory=list)
    served: list[asyncio.Task] = field(default_factory=list)
    controls: list[QueueControl] = field(default_factory=list)
    errors: list[TransferError] = field(default_factory=list)
    """What the senders' ends failed with."""

    def offer(self, whole: np.ndarray, *, limit_s: float = 10.0, **options) -> list:
        """Every sender offers its shard of `whole` (layers, 2, tokens, heads, dim)."""
        offers = []
        for index, (arena, sender) in enumerate(zip(self.arenas, self.senders, strict=True)):
            blocks = write(arena, whole)
            offers.append(
                sender.offer(
                    "t", whole.shape[2], blocks, limit_s, lambda _, index=index: self.released.append(index), **options
                )
            )
        return offers

    def serve(self, index: int) -> QueueControl:
        receiving, sending = control_pair()
        self.controls.append(receiving)

        async def serve() -> None:
            try:
                await self.senders[index].serve(sending, 10.0)
                await sending.close()
            except TransferError as error:
                self.errors.append(error)
                sending.fail(error)

        self.served.append(asyncio.ensure_future(serve()))
        return receiving

    def pull(self, to: int, index: int, area: Area | None, tokens: int, *, skip: int = 0):
        arena, receiver = self.receivers[to]
        opening = Open(
            transfer_id="t",
            sender_incarnation=sender_named(index),
            receiver_incarnation=self.incarnations[to % len(self.incarnations)],
            layout=arena.layout,
            skip_tokens=skip,
        )
        blocks = block_order(arena.layout, tokens)
        return receiver.pull(self.serve(index), opening, block_ids=blocks, tokens=tokens, timeout_s=10.0, area=area)

    async def pull_all(self, to: int, tokens: int, *, skip: int = 0) -> list[Received]:
        parts = overlapping(self.receivers[to][0].layout, [arena.layout for arena in self.arenas])
        pulls = [self.pull(to, index, area, tokens, skip=skip) for index, area in parts.items()]
        return await asyncio.gather(*pulls)


def sender_named(index: int) -> str:
    return f"5e4de4{index:010}"


def block_order(layout: KvLayout, tokens: int) -> list[int]:
    return np.random.default_rng(layout.block_tokens).permutation(BLOCKS)[: -(-tokens // layout.block_tokens)].tolist()


def write(arena: Arena, whole: np.ndarray) -> list[int]:
    layout, tokens = arena.layout, whole.shape[2]
    blocks = block_order(layout, tokens)
    own = whole[layout.layer_begin : layout.layer_end, :, :, layout.head_begin : layout.head_end]
    for token in range(tokens):
        arena.array[:, :, blocks[token // layout.block_tokens], token % layout.block_tokens] = own[:, :, token]
    return blocks


def expected(layout: KvLayout, whole: np.ndarray, skip: int = 0) -> np.ndarray:
    """What a receiving arena that was all zeros must hold in the end."""
    arena, kv = Arena(layout, BLOCKS), whole.copy()
    kv[:, :, :skip] = 0
    write(arena, kv)
    return arena.array


def make_kv(tokens: int) -> np.ndarray:
    return np.random.default_rng(7).integers(1, 60_000, (30, 2, tokens, 3, 64)).astype(np.uint16)


@contextlib.asynccontextmanager
async def group_over(
    transport, sending: list[KvLayout], receiving: list[KvLayout], lives: dict[str, Transport] | None = None
) -> AsyncIterator[Group]:
    """`lives`: incarnations and transports of the receivers, in turn; else they are the senders' own."""
    lives = lives or {INCARNATION: transport}
    arenas = [Arena(layout, BLOCKS) for layout in sending]
    senders = [
        Sender(transport, arena, incarnation=sender_named(index), checksums=True) for index, arena in enumerate(arenas)
    ]
    own = list(lives.values())
    targets = [Arena(layout, BLOCKS) for layout in receiving]
    receivers = [(arena, Receiver(own[to % len(own)], arena)) for to, arena in enumerate(targets)]
    group = Group(arenas, senders, receivers, list(lives))
    try:
        yield group
    finally:
        for _, receiver in group.receivers:
            await receiver.aclose()
            assert receiver.staging_out == receiver.quarantined == 0
        for sender in senders:
            await sender.aclose()
            assert sender.offers == 0
        await asyncio.gather(*group.served)


@pytest.mark.parametrize(
    ("sending", "receiving"),
    [
        (cut(1, 3, 16), cut(1, 1, 16)),
        (cut(1, 1, 16), cut(1, 3, 16)),
        (cut(2, 1, 16), cut(3, 1, 24)),
        (cut(2, 3, 16), cut(3, 2, 24)),
    ],
    ids=["gathers heads", "parts heads", "other stages and blocks", "everything differs"],
)
async def test_every_shard_gets_its_own_whole_and_every_sender_is_released_once(transport, sending, receiving):
    tokens, skip = 333, 48
    whole = make_kv(tokens)
    async with group_over(transport, sending, receiving) as group:
        offers = group.offer(whole)
        pulls = [asyncio.ensure_future(group.pull_all(to, tokens, skip=skip)) for to in range(len(receiving))]
        for chunk in (128, 200, tokens):
            for offer in offers:
                offer.advance(chunk)
            await asyncio.sleep(0)
        for offer in offers:
            offer.finish(7)
        received = [each for pull in pulls for each in await pull]
        assert {each.first_token_id for each in received} == {7}
        assert sum(each.bytes for each in received) == (tokens - skip) * LAYOUT.token_bytes
        for (arena, _), layout in zip(group.receivers, receiving, strict=True):
            np.testing.assert_array_equal(arena.array, expected(layout, whole, skip))
        await until(lambda: len(group.released) >= len(sending))
        assert sorted(group.released) == list(range(len(sending)))
        assert group.errors == []


async def test_an_offer_is_kept_until_the_last_of_its_receivers_has_acknowledged(transport):
    tokens = 40
    async with group_over(transport, cut(1, 1, 16), cut(2, 1, 16)) as group:
        whole = make_kv(tokens)
        (offer,) = group.offer(whole)
        offer.advance(tokens)
        offer.finish(7)
        await group.pull_all(0, tokens)
        await asyncio.gather(*group.served)
        assert group.released == group.errors == []
        with pytest.raises(TransferUsed):
            await group.pull_all(0, tokens)
        await group.pull_all(1, tokens)
        await until(lambda: group.released == [0])
        for arena, _ in group.receivers:
            np.testing.assert_array_equal(arena.array, expected(arena.layout, whole))
        with pytest.raises(TransferUsed):
            await group.pull_all(1, tokens)


async def test_receivers_that_hold_the_same_heads_are_served_as_often_as_was_said():
    """Six tensor-parallel shards share three heads. Over memory: a process has one life on UCX."""
    tokens = 40
    sending, *lives = (INCARNATION[:-1] + "1", "a" * 16, "b" * 16)
    transports = {incarnation: make_transport("memory", incarnation) for incarnation in (sending, *lives)}
    for transport in transports.values():
        await transport.start()
    source = transports.pop(sending)
    async with group_over(source, cut(1, 1, 16), cut(1, 3, 16, replicas=2), transports) as group:
        whole = make_kv(tokens)
        (offer,) = group.offer(whole, consumers=2)
        offer.advance(tokens)
        offer.finish(7)
        for to, (arena, _) in enumerate(group.receivers):
            assert group.released == []
            await group.pull_all(to, tokens)
            with pytest.raises(TransferUsed):
                await group.pull_all(to, tokens)
            np.testing.assert_array_equal(arena.array, expected(arena.layout, whole))
        await until(lambda: group.released == [0])
    for transport in (source, *transports.values()):
        await transport.aclose()


async def test_when_one_receiver_fails_the_others_fail_at_once_and_nothing_is_read_any_more(transport):
    tokens = 333
    async with group_over(transport, cut(1, 1, 16), cut(3, 1, 16)) as group:
        (offer,) = group.offer(make_kv(tokens))
        offer.advance(200)
        first, second = (asyncio.ensure_future(group.pull_all(to, tokens)) for to in range(2))
        await until(lambda: all(receiver.staging_out for _, receiver in group.receivers[:2]))
        first.cancel()
        with pytest.raises(TransferAborted, match="another receiver of t failed"):
            await second
        await until(lambda: group.released == [0])
        with pytest.raises(TransferAborted, match="another receiver of t failed"):
            await group.pull_all(2, tokens)


async def test_a_part_that_nobody_pulls_ends_with_the_lease(transport):
    tokens = 40
    async with group_over(transport, cut(1, 1, 16), cut(2, 1, 16)) as group:
        (offer,) = group.offer(make_kv(tokens), limit_s=0.5)
        offer.advance(tokens)
        offer.finish(7)
        await group.pull_all(0, tokens)
        await until(lambda: group.released == [0])
        assert isinstance(offer.error, TransferExpired)


async def test_pulls_of_several_shards_wait_for_an_offer_that_comes_later(transport):
    tokens = 40
    async with group_over(transport, cut(1, 1, 16), cut(2, 1, 16)) as group:
        whole = make_kv(tokens)
        pulls = [asyncio.ensure_future(group.pull_all(to, tokens)) for to in range(2)]
        await until(lambda: sum(bool(control.said) for control in group.controls) == 2)
        with pytest.raises(TransferUsed):
            await group.pull_all(1, tokens)
        (offer,) = group.offer(whole)
        offer.advance(tokens)
        offer.finish(7)
        await asyncio.gather(*pulls)
        for arena, _ in group.receivers:
            np.testing.assert_array_equal(arena.array, expected(arena.layout, whole))


async def test_a_request_that_ends_with_its_first_token_is_told_to_every_shard(transport):
    async with group_over(transport, cut(2, 1, 16), cut(1, 3, 16)) as group:
        offers = group.offer(make_kv(333))
        pulls = [asyncio.ensure_future(group.pull_all(to, 333)) for to in range(3)]
        await until(lambda: all(receiver.staging_out for _, receiver in group.receivers))
        for offer in offers:
            offer.finish(2, "stop")
        received = [each for pull in pulls for each in await pull]
        assert [(each.first_token_id, each.finished, each.bytes) for each in received] == [(2, "stop", 0)] * 6
        await until(lambda: sorted(group.released) == [0, 1])


async def test_a_sender_that_has_less_than_it_was_pulled_for_is_never_an_answer(transport):
    """Since shards may differ, half of the layers are no layout error by themselves; the receiver must notice."""
    tokens = 40
    async with group_over(transport, cut(2, 1, 16), cut(1, 1, 16)) as group:
        for offer in group.offer(make_kv(tokens)):
            offer.advance(tokens)
            offer.finish(7)
        with pytest.raises(LayoutMismatch, match=r"brings layers \[0, 15\) × heads \[0, 3\), not layers \[0, 30\)"):
            await group.pull(0, 0, None, tokens)
        with pytest.raises(LayoutMismatch, match="brings"):
            await group.pull(0, 1, cut(2, 1, 16)[0].area, tokens)
        assert (group.receivers[0][0].array == 0).all()


async def test_shards_that_share_nothing_are_refused_and_the_offer_stays(transport):
    tokens = 40
    async with group_over(transport, cut(2, 1, 16), cut(2, 1, 16)) as group:
        whole = make_kv(tokens)
        for offer in group.offer(whole):
            offer.advance(tokens)
            offer.finish(7)
        with pytest.raises(LayoutMismatch, match="share no KV"):
            await group.pull(0, 1, None, tokens)
        assert group.released == []
        for to, (arena, _) in enumerate(group.receivers):
            await group.pull_all(to, tokens)
            np.testing.assert_array_equal(arena.array, expected(arena.layout, whole))
