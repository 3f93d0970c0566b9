from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import Arena, KvLayout, LayoutMismatch, TransportUnavailable, plan_pieces
from kvtransfer.manifest import PIECE_BYTES, plan, require_same_manifest

SMOLLM2 = KvLayout(model="m", dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=16)
TINY = KvLayout(model="m", dtype="bf16", layers=3, kv_heads=2, head_dim=4, block_tokens=16)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 127, 128, 129, 1000])
def test_pieces_cover_every_token_of_every_layer_once(tokens):
    covered = np.zeros((tokens, 30), int)
    for piece in plan_pieces(SMOLLM2, SMOLLM2, tokens):
        covered[piece.token_begin : piece.token_end, piece.layer_begin : piece.layer_end] += 1
    assert (covered == 1).all()
    assert sum(piece.bytes for piece in plan_pieces(SMOLLM2, SMOLLM2, tokens)) == tokens * 23_040


def test_pieces_of_a_large_model_are_cut_into_layer_groups_of_two_to_four_megabytes():
    large = KvLayout(model="m", dtype="bf16", layers=32, kv_heads=8, head_dim=128, block_tokens=16)
    sizes = {piece.bytes for piece in plan_pieces(large, large, 1024)}
    assert max(sizes) <= PIECE_BYTES
    assert min(sizes) >= 2_000_000 * 2 / 4
    assert 2_000_000 <= max(plan_pieces(SMOLLM2, SMOLLM2, 1024), key=lambda piece: piece.bytes).bytes <= PIECE_BYTES


def test_pieces_come_by_token_range_then_by_layer_group():
    fp32 = dataclasses.replace(SMOLLM2, dtype="fp32")
    order = [(piece.token_begin, piece.layer_begin) for piece in plan_pieces(fp32, fp32, 300)]
    assert order == sorted(order)
    assert [piece.index for piece in plan_pieces(fp32, fp32, 300)] == list(range(len(order)))
    assert len({layer for _, layer in order}) == 2


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 600), st.data())
@settings(max_examples=60, deadline=None)
def test_both_sides_plan_the_same(own, peer, tokens, data):
    skip = data.draw(st.integers(0, tokens))
    one, other = (dataclasses.replace(TINY, block_tokens=size) for size in (own, peer))
    ours = plan_pieces(one, other, tokens, skip)
    assert ours == plan_pieces(other, one, tokens, skip)
    assert sum(piece.bytes for piece in ours) == (tokens - skip) * TINY.token_bytes


@pytest.mark.parametrize("skip", [-1, 11])
def test_skipping_more_than_there_is_is_refused(skip):
    with pytest.raises(ValueError, match="skip_tokens"):
        plan_pieces(TINY, TINY, 10, skip)


def test_another_manifest_is_named():
    own = plan(TINY, TINY, 20)
    require_same_manifest(own, tokens=20, pieces=1, total_bytes=20 * TINY.token_bytes)
    with pytest.raises(LayoutMismatch, match="bytes"):
        require_same_manifest(own, tokens=20, pieces=1, total_bytes=1)


@given(
    own=st.integers(1, 24),
    peer=st.integers(1, 24),
    tokens=st.integers(1, 200),
    dtype=st.sampled_from(["bf16", "fp32"]),
    seed=st.integers(0, 99),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_gather_and_scatter_are_a_plain_copy_of_the_tokens(own, peer, tokens, dtype, seed, data):
    """Against an oracle that copies token by token, over any block sizes and any order of blocks."""
    skip = data.draw(st.integers(0, tokens))
    random = np.random.default_rng(seed)
    source_layout = dataclasses.replace(TINY, block_tokens=own, dtype=dtype)
    target_layout = dataclasses.replace(TINY, block_tokens=peer, dtype=dtype)
    source, target = Arena(source_layout, 220), Arena(target_layout, 220)
    for arena in (source, target):
        arena.array[...] = random.integers(0, 60_000, arena.array.shape)
    source_blocks, target_blocks = random.permutation(220).tolist(), random.permutation(220).tolist()
    expected = target.array.copy()
    for token in range(skip, tokens):
        kv = source.array[:, :, source_blocks[token // own], token % own]
        expected[:, :, target_blocks[token // peer], token % peer] = kv
    for piece in plan_pieces(source_layout, target_layout, tokens, skip):
        buffer = source.staging(piece.bytes + 100)
        source.gather(piece, source_blocks, buffer)
        target.scatter(piece, target_blocks, buffer)
    np.testing.assert_array_equal(target.array, expected)


def test_a_piece_is_in_c_order_on_the_wire():
    arena = Arena(TINY, 4)
    arena.array[...] = np.arange(arena.array.size).reshape(arena.array.shape)
    (piece,) = plan_pieces(TINY, TINY, 20)
    buffer = arena.staging(piece.bytes)
    arena.gather(piece, [2, 0], buffer)
    tokens = np.concatenate([arena.array[:, :, 2], arena.array[:, :, 0, :4]], axis=2)
    assert buffer.tobytes() == tokens.tobytes()


@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_outside_of_the_arena_is_refused(block):
    arena = Arena(TINY, 4)
    (piece,) = plan_pieces(TINY, TINY, 1)
    with pytest.raises(ValueError, match="not within"):
        arena.scatter(piece, [block], arena.staging(piece.bytes))


def test_devices_are_named():
    with pytest.raises(ValueError, match="device"):
        Arena(TINY, 1, device="tpu")
    with pytest.raises(TransportUnavailable, match="cuda:99"):
        Arena(TINY, 1, device="cuda:99")
