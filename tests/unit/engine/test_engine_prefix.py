"""Keys of full blocks, and what a sequence finds and leaves in the prefix cache."""

from __future__ import annotations

import hashlib

import pytest

from kvtransfer.blocks import BlockPool
from services.engine.prefix import PrefixCache, block_key, root_key
from services.engine.sequence import TokenSequence

BLOCK = 4


def cache(blocks: int = 32, *, enabled: bool = True) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(blocks)
    return pool, PrefixCache(pool, block_tokens=BLOCK, fingerprint="f", enabled=enabled)


def sequence(tokens: int, *, seed: int = 0) -> TokenSequence:
    return TokenSequence(token_ids=[seed + n for n in range(tokens)])


def run(pool: BlockPool, prefix: PrefixCache, owner: str, made: TokenSequence) -> int:
    """Computes a sequence to its end; returns how many tokens were there already."""
    cached = prefix.admit(owner, made)
    assert cached is not None
    made.advance(made.pending)
    prefix.register(owner, made)
    pool.free(owner)
    pool.check()
    return cached


def test_a_key_is_the_documented_hash_of_parent_and_tokens() -> None:
    root = hashlib.blake2b(b"0123abcd", digest_size=16).digest()
    assert root_key("0123abcd") == root
    tokens = [1, 2, 70_000, 2**32 - 1]
    written = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert block_key(root, tokens) == hashlib.blake2b(root + written, digest_size=16).digest()


def test_a_key_never_changes_between_processes_or_versions() -> None:
    assert block_key(root_key("f"), [1, 2, 3, 4]).hex() == "20f0d7d1d394dd55a6eaa5270c419a26"


def test_a_key_depends_on_every_token_before_and_on_the_fingerprint() -> None:
    root = root_key("f")
    keys = {block_key(block_key(start, first), [5, 6]) for start in (root, root_key("g")) for first in ([1, 2], [2, 1])}
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("tokens", "cached"),
    [(1, 0), (BLOCK - 1, 0), (BLOCK, 0), (BLOCK + 1, BLOCK), (2 * BLOCK, BLOCK), (2 * BLOCK + 1, 2 * BLOCK)],
)
def test_the_same_tokens_again_find_all_full_blocks_but_never_the_last_token(tokens: int, cached: int) -> None:
    pool, prefix = cache()
    assert run(pool, prefix, "a", sequence(tokens)) == 0
    again = sequence(tokens)
    assert prefix.admit("b", again) == cached
    assert (again.computed, again.pending) == (cached, tokens - cached)
    assert len(again.blocks) == -(-tokens // BLOCK)


def test_a_sequence_shares_as_far_as_it_begins_alike() -> None:
    pool, prefix = cache()
    run(pool, prefix, "a", sequence(20))
    other = TokenSequence(token_ids=[*range(9), 99, *range(10, 20)])
    assert prefix.admit("b", other) == 8
    assert prefix.admit("c", sequence(20, seed=1)) == 0


def test_only_full_blocks_of_computed_tokens_are_registered_and_each_as_it_fills() -> None:
    pool, prefix = cache()
    first = sequence(10)
    prefix.admit("a", first)
    for tokens, found in ((3, 0), (1, 4), (5, 8), (1, 8)):
        first.advance(tokens)
        prefix.register("a", first)
        reader = sequence(10)
        assert prefix.admit("b", reader) == found
        assert reader.blocks[: found // BLOCK] == first.blocks[: found // BLOCK]
        pool.free("b")
    first.append(77)
    first.append(78)
    prefix.register("a", first)
    assert first.registered == 2, "tokens without KV make no block full"


def test_sequences_after_one_that_gave_its_blocks_up_find_what_is_left_of_them() -> None:
    pool, prefix = cache(blocks=4)
    first = sequence(13)
    prefix.admit("a", first)
    first.advance(13)
    prefix.register("a", first)
    pool.free("a")
    pool.allocate(2, "other")  # the one that was not full, and the last that was
    again = first.without_blocks()
    assert (again.computed, again.blocks, again.token_ids) == (0, [], first.token_ids)
    assert prefix.admit("a", again) is None
    pool.free("other")
    assert prefix.admit("a", again) == 8


def test_room_for_more_tokens_is_given_beside_what_is_shared() -> None:
    pool, prefix = cache(blocks=6)
    run(pool, prefix, "a", sequence(9))
    again = sequence(9)
    assert prefix.admit("b", again, room_tokens=4) == 8
    assert len(again.blocks) == 4
    assert prefix.admit("c", sequence(9), room_tokens=4) == 8, "two shared, two of its own"
    assert pool.counts().free == 0


def test_a_cache_that_is_off_finds_and_registers_nothing() -> None:
    pool, prefix = cache(enabled=False)
    assert [run(pool, prefix, name, sequence(17)) for name in "ab"] == [0, 0]
    assert pool.counts().cached == 0
