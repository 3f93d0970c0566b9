"""KV that moves between differently cut workers, against a plain copy of single tokens."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import Arena, KvLayout, overlapping, plan_pieces
from kvtransfer.manifest import PIECE_BYTES, PIECE_TOKENS

SPARE_BLOCKS = 3


def cuts(draw: random.Random, size: int) -> list[tuple[int, int]]:
    """[0, size) in ranges of any sizes."""
    inner = draw.sample(range(1, size), draw.randint(0, min(2, size - 1)))
    return list(pairwise([0, *sorted(inner), size]))


def shards(draw: random.Random, model: KvLayout) -> list[KvLayout]:
    """A model cut into pipeline stages and tensor-parallel ranges, in any order, some perhaps held twice."""
    block_tokens = draw.randint(1, 32)
    cut = [
        dataclasses.replace(
            model, block_tokens=block_tokens, layer_begin=layers[0], layer_end=layers[1], head_begin=a, head_end=b
        )
        for layers in cuts(draw, model.layers)
        for a, b in cuts(draw, model.kv_heads)
    ]
    cut += draw.sample(cut, draw.randint(0, 1))
    draw.shuffle(cut)
    return cut


def noise(numbers: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random bits, as integers: also those that are no number as a float."""
    kind = {"bf16": np.uint16, "fp32": np.uint32}[dtype]
    return numbers.integers(0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)


class Worker:
    """An arena full of noise, and the blocks of one sequence in it."""

    def __init__(self, draw: random.Random, numbers: np.random.Generator, layout: KvLayout, tokens: int) -> None:
        needed = -(-tokens // layout.block_tokens)
        self.arena = Arena(layout, needed + SPARE_BLOCKS)
        self.blocks = draw.sample(range(needed + SPARE_BLOCKS), needed)
        self.bits = self.arena.array.view({"bf16": np.uint16, "fp32": np.uint32}[layout.dtype])
        self.bits[...] = noise(numbers, self.bits.shape, layout.dtype)

    def write(self, bits: np.ndarray, whole: np.ndarray, tokens: range) -> None:
        """Its shard of `whole` (layers, 2, tokens, heads, dim), token by token."""
        layout = self.arena.layout
        own = whole[layout.layer_begin : layout.layer_end, :, :, layout.head_begin : layout.head_end]
        for token in tokens:
            block, offset = divmod(token, layout.block_tokens)
            bits[:, :, self.blocks[block], offset] = own[:, :, token]


def check(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    # Huge pages would cost more than everything else here.
    monkeypatch.setattr("kvtransfer.huge_pages.zeros", lambda count: np.zeros(count, np.uint8))
    monkeypatch.setattr("kvtransfer.manifest.PIECE_TOKENS", draw.choice([1, 8, 32, PIECE_TOKENS]))
    monkeypatch.setattr("kvtransfer.manifest.PIECE_BYTES", draw.choice([64, 1024, 8192, PIECE_BYTES]))
    model = KvLayout(
        model="m",
        dtype=draw.choice(["bf16", "fp32"]),
        layers=draw.randint(1, 6),
        kv_heads=draw.randint(1, 6),
        head_dim=draw.randint(1, 4),
        block_tokens=1,
    )
    tokens = draw.choice([0, 1, draw.randint(2, 70)])
    skip = draw.choice([0, draw.randint(0, tokens)])
    whole = noise(numbers, (model.layers, 2, tokens, model.kv_heads, model.head_dim), model.dtype)
    senders = [Worker(draw, numbers, layout, tokens) for layout in shards(draw, model)]
    for sender in senders:
        sender.write(sender.bits, whole, range(tokens))
    for layout in shards(draw, model):
        receiver = Worker(draw, numbers, layout, tokens)
        expected = receiver.bits.copy()
        receiver.write(expected, whole, range(skip, tokens))
        for index in overlapping(layout, [sender.arena.layout for sender in senders]):
            sender = senders[index]
            pieces = plan_pieces(sender.arena.layout, layout, tokens, skip)
            assert pieces == plan_pieces(layout, sender.arena.layout, tokens, skip)
            for piece in pieces:
                message = sender.arena.staging(piece.bytes)
                sender.arena.gather(piece, sender.blocks, message)
                receiver.arena.scatter(piece, receiver.blocks, message)
        np.testing.assert_array_equal(receiver.bits, expected)


def test_two_thousand_pairs_of_layouts_are_bit_exact(monkeypatch):
    for seed in range(2000):
        check(seed, monkeypatch)


@given(st.integers(2000, 1 << 40))
@settings(max_examples=100, deadline=None)
def test_any_pair_of_layouts_is_bit_exact(seed):
    with pytest.MonkeyPatch.context() as monkeypatch:
        check(seed, monkeypatch)


def test_each_byte_travels_once():
    model = KvLayout(model="m", dtype="bf16", layers=5, kv_heads=4, head_dim=8, block_tokens=16)
    senders = [dataclasses.replace(model, head_begin=head, head_end=head + 1) for head in range(4)]
    receivers = [dataclasses.replace(model, layer_begin=a, layer_end=b) for a, b in ((0, 2), (2, 5))]
    moved = sum(
        piece.bytes
        for receiver in receivers
        for index in overlapping(receiver, senders)
        for piece in plan_pieces(senders[index], receiver, 100, 3)
    )
    assert moved == 97 * model.token_bytes
