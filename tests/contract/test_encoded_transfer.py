"""Transfers of encoded KV, over every transport: as near as the encoding can be, and as safe as with plain KV."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import pytest_asyncio
import torch
from kv_pairs import LAYOUT, SLOW, control_pair, make_transport, pair_over, read_kv

from kvtransfer import Accepted, Allowed, LayoutMismatch, ProtocolViolation, allow, plan_pieces
from kvtransfer.codec import Encoding, wire_bytes
from kvtransfer.transport.base import Transport

pytestmark = pytest.mark.asyncio(loop_scope="module")

TINY = dataclasses.replace(LAYOUT, layers=4, layer_end=4)
BOUNDS = {"int8": 0.5 / 127 + 2**-8, "fp8": 2**-4}
"""Of the error: int8 in parts of its channel's largest value (bf16 rounds once more), fp8 of the value itself."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["memory", "ucx", SLOW])
async def transport(request):
    transport = make_transport(request.param, "4ece17e4" + "0" * 8)
    await transport.start()
    yield transport
    await transport.aclose()


def numbers(kv: np.ndarray) -> np.ndarray:
    return torch.from_numpy(kv.copy()).view(torch.bfloat16).double().numpy()


def fill(pair, transfer_id: str, tokens: int) -> np.ndarray:
    """KV of a normal distribution in the source's blocks; returned as numbers (layers, 2, tokens, heads, dim)."""
    layout, arena = pair.source.arena.layout, pair.source.arena
    blocks = pair.source.pool.allocate(-(-tokens // layout.block_tokens), transfer_id)
    shape = (layout.local_layers, 2, len(blocks), layout.block_tokens, layout.local_heads, layout.head_dim)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)
    arena.array[:, :, list(blocks)] = values.view(torch.uint16).numpy()
    return numbers(read_kv(arena, blocks, tokens))


async def move(pair, tokens: int, encoding: str, **options):
    offer = pair.offer("t", tokens)
    offer.advance(tokens)
    offer.finish(7)
    return await pair.pull("t", tokens, allowed=allow(encoding), **options)


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 128, 129, 300])
async def test_kv_arrives_within_the_bound_in_about_half_the_bytes(transport, encoding, tokens) -> None:
    async with pair_over(transport, transport, layout=TINY, checksums=True, compression=encoding) as pair:
        exact = fill(pair, "t", tokens)
        before = transport.counters.bytes_sent
        received = await move(pair, tokens, encoding)
        got = numbers(pair.received("t", tokens))
        assert np.isfinite(got).all()
        for begin in range(0, tokens, 128):  # a piece has scales of its own
            part = exact[:, :, begin : begin + 128]
            size = np.abs(part)
            if encoding == "int8":
                size = size.max(axis=2, keepdims=True)
            else:
                size = np.maximum(size, np.abs(part).max(axis=(2, 4), keepdims=True) * 2.0**-13)  # subnormals
            assert (np.abs(got[:, :, begin : begin + 128] - part) <= BOUNDS[encoding] * size).all()
        pieces = plan_pieces(TINY, TINY, tokens, 0, encoding)
        assert (np.abs(got - exact).max() > 0) == any(piece.encoded for piece in pieces)
        assert received.encoding == encoding
        assert transport.counters.bytes_sent - before == received.bytes == sum(piece.wire_bytes for piece in pieces)
        if tokens >= 128:
            assert received.bytes < 0.56 * tokens * TINY.token_bytes
        await asyncio.gather(*pair.served)
        assert pair.released == ["t"]


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
async def test_shards_block_sizes_and_skipped_tokens_are_as_with_plain_kv(transport, encoding) -> None:
    target = dataclasses.replace(TINY, block_tokens=24, head_begin=1, head_end=2, layer_begin=1, layer_end=3)
    async with pair_over(transport, transport, layout=TINY, target_layout=target, compression=encoding) as pair:
        exact = fill(pair, "t", 200)[1:3, :, :, 1:2]
        offer = pair.offer("t", 200)
        offer.advance(200)
        offer.finish(7)
        blocks = pair.target.pool.allocate(9, "t")
        pair.target.arena.array[...] = 0x4000  # 2.0
        pull = asyncio.ensure_future(
            pair.receiver.pull(
                pair.start_serving(),
                pair.opening("t", 48, allowed=allow(encoding)),
                block_ids=blocks,
                tokens=200,
                timeout_s=10.0,
                area=target.area,
            )
        )
        await pull
        got = numbers(read_kv(pair.target.arena, blocks, 200))
        assert (got[:, :, :48] == 2.0).all()
        np.testing.assert_allclose(got[:, :, 48:], exact[:, :, 48:], atol=5 * BOUNDS[encoding])
        pair.sender.release("t")  # nobody pulls the other shards


@pytest.mark.parametrize(("sender", "receiver"), [("int8", "off"), ("off", "int8"), ("fp8", "int8"), ("auto", "auto")])
async def test_what_one_side_does_not_want_or_nobody_measured_is_plain(transport, sender, receiver) -> None:
    async with pair_over(transport, transport, layout=TINY, compression=sender) as pair:
        exact = fill(pair, "t", 130)
        received = await move(pair, 130, receiver)
        assert (received.encoding, received.bytes) == ("plain", 130 * TINY.token_bytes)
        np.testing.assert_array_equal(numbers(pair.received("t", 130)), exact)


async def test_auto_encodes_where_prefill_is_faster_than_the_measured_link(transport) -> None:
    options = {"layout": TINY, "compression": "auto", "produced_bytes_per_s": lambda: 2e6}
    for link, encoding in ((1e6, "int8"), (3e6, "plain")):
        async with pair_over(transport, transport, **options) as pair:
            fill(pair, "t", 40)
            offer = pair.offer("t", 40)
            offer.advance(40)
            offer.finish(7)
            received = await pair.pull("t", 40, allowed=allow("auto", link))
            assert received.encoding == encoding


def accepted(transport: Transport, size: int, encoding: Encoding) -> Accepted:
    """What the sender of 40 tokens says that has chosen `encoding`."""
    return Accepted(
        tokens=40,
        pieces=1,
        bytes=size,
        layout=TINY,
        data_address=transport.address,
        transport=transport.name,
        tag_base=1 << 30,
        encoding=encoding,
    )


async def test_a_sender_that_chooses_what_was_not_allowed_is_refused(transport) -> None:
    async with pair_over(transport, transport, layout=TINY) as pair:
        receiving, sending = control_pair()
        blocks = pair.target.pool.allocate(3, "t")
        opening = pair.opening("t", allowed=Allowed(encodings=("int8",)))
        pull = asyncio.ensure_future(pair.receiver.pull(receiving, opening, block_ids=blocks, tokens=40, timeout_s=5.0))
        await sending.receive()
        size = wire_bytes("fp8", (4, 2, 40, 3, 64), 2)
        await sending.send(accepted(transport, size, "fp8"))
        with pytest.raises(ProtocolViolation, match="fp8"):
            await pull
        await sending.close()


async def test_sides_that_disagree_about_the_bytes_of_an_encoding_move_nothing(transport) -> None:
    async with pair_over(transport, transport, layout=TINY) as pair:
        receiving, sending = control_pair()
        blocks = pair.target.pool.allocate(3, "t")
        pull = asyncio.ensure_future(
            pair.receiver.pull(
                receiving, pair.opening("t", allowed=allow("int8")), block_ids=blocks, tokens=40, timeout_s=5.0
            )
        )
        await sending.receive()
        await sending.send(accepted(transport, 40 * TINY.token_bytes, "int8"))
        with pytest.raises(LayoutMismatch, match="bytes"):
            await pull
        await sending.close()
