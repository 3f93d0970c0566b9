"""The prefix cache: full blocks of KV are computed once and shared by all sequences that begin alike.

A block's key is a hash over the key of the block before it and its own token ids, so that it names the whole prefix;
the first one starts from the fingerprint of model and precision. It is the same in every process and version of Python.
With 128 bits nobody will see two prefixes with the same key (at 10¹² blocks the odds are below 10⁻¹⁴), so token ids are
not compared again.

Where the KV is shared and when it is dropped is the block pool's business; here is what a core says to it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from kvtransfer.blocks import BlockPool
from kvtransfer.contents import BlockKey
from services.engine.sequence import TokenSequence

KEY_BYTES = 16


def root_key(fingerprint: str) -> BlockKey:
    """What stands for "the block before the first one", for KV of this fingerprint (see KvLayout.fingerprint)."""
    return blake2b(fingerprint.encode(), digest_size=KEY_BYTES).digest()


def block_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Key of a full block: blake2b over its parent's key and its token ids as little-endian uint32."""
    return blake2b(parent + struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=KEY_BYTES).digest()


class PrefixCache:
    """One worker's prefix cache, over its block pool. When it is not `enabled`, it finds and registers nothing."""

    def __init__(self, pool: BlockPool, *, block_tokens: int, fingerprint: str, enabled: bool = True) -> None:
        self._pool, self._block_tokens, self._enabled = pool, block_tokens, enabled
        self._root = root_key(fingerprint)

    def admit(self, owner: str, sequence: TokenSequence, *, room_tokens: int = 0, whole: bool = False) -> int | None:
        """Gives a sequence without blocks those for all its tokens and `room_tokens` more, cached ones first.

        `whole`: all of it is to be computed, because somebody wants to know more than its KV.

        Returns how many of its tokens have their KV already, and advances it over them: whole blocks, never its last
        token, whose logits somebody will want. None: the free blocks do not suffice, and nothing was given.
        """
        keys = () if whole else self._match(sequence)
        needed = sequence.blocks_missing(self._block_tokens, room_tokens=room_tokens)
        if not self._pool.can_allocate(needed, keys):
            return None
        sequence.add_blocks(self._pool.allocate(needed, owner, keys))
        sequence.advance(len(keys) * self._block_tokens)
        sequence.registered = len(keys)
        return sequence.computed

    def cost(self, sequence: TokenSequence, *, room_tokens: int = 0, whole: bool = False) -> int:
        """How many of the free blocks `admit` with the same arguments would take."""
        keys = () if whole else self._match(sequence)
        return self._pool.cost(sequence.blocks_missing(self._block_tokens, room_tokens=room_tokens), keys)

    def register(self, owner: str, sequence: TokenSequence) -> None:
        """Lets others share the sequence's blocks that are full of computed KV by now. `owner` holds them."""
        full = sequence.computed // self._block_tokens
        if self._enabled and full > sequence.registered:
            self._pool.register(owner, self._keys(sequence, full)[sequence.registered :])
            sequence.registered = full

    def doubt(self) -> None:
        """The engine failed or computed what is no number: nothing that is here now is shared any more."""
        self._pool.doubt_contents()

    def _match(self, sequence: TokenSequence) -> Sequence[BlockKey]:
        if not self._enabled:
            return ()
        keys = self._keys(sequence, (len(sequence.token_ids) - 1) // self._block_tokens)
        return keys[: self._pool.match(keys)]

    def _keys(self, sequence: TokenSequence, blocks: int) -> Sequence[BlockKey]:
        """Keys of the first `blocks` blocks, which are full of tokens."""
        keys, size = sequence.block_keys, self._block_tokens
        while len(keys) < blocks:
            begin = len(keys) * size
            keys.append(block_key(keys[-1] if keys else self._root, sequence.token_ids[begin : begin + size]))
        return keys[:blocks]
