"""One request's tokens: how many of them have their KV in blocks, which blocks, and when the sequence ends.

Plain bookkeeping on plain values; the step thread that owns a sequence is the only one to touch it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvtransfer.contents import BlockKey
from services.engine.plan import Slice

FinishReason = Literal["stop", "length"]


def blocks_needed(tokens: int, block_tokens: int) -> int:
    """How many blocks of `block_tokens` hold the KV of `tokens` tokens."""
    return -(-tokens // block_tokens)


def finish_reason(
    token: int, generated: int, max_new_tokens: int, stop_token_ids: Collection[int]
) -> FinishReason | None:
    """Whether the sequence ends with `token`, the `generated`-th new token (counted from 1).

    A stop token wins over the length: an answer that ends by itself with its last allowed token has stopped.
    """
    if token in stop_token_ids:
        return "stop"
    return "length" if generated >= max_new_tokens else None


@dataclass(kw_only=True, slots=True)
class TokenSequence:
    """Token ids from position 0, of which the first `computed` have their KV in `blocks`.

    `block_keys` name the content of full blocks, as far as somebody asked for it; the pool was told those of the first
    `registered` blocks. Both are the prefix cache's business.
    """

    token_ids: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    block_keys: list[BlockKey] = field(default_factory=list)
    registered: int = 0

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.computed

    def blocks_missing(self, block_tokens: int, *, room_tokens: int = 0) -> int:
        """Blocks to allocate before all tokens, and `room_tokens` more, can be computed."""
        return max(0, blocks_needed(len(self.token_ids) + room_tokens, block_tokens) - len(self.blocks))

    def add_blocks(self, blocks: Iterable[int]) -> None:
        """Append blocks to the end of the sequence's block table."""
        self.blocks.extend(blocks)

    def next_slice(self, limit_tokens: int) -> Slice:
        """The next at most `limit_tokens` pending tokens. Logits are wanted when they reach the end of the sequence."""
        begin, known = self.computed, len(self.token_ids)
        end = min(begin + limit_tokens, known)
        if end <= begin:
            raise ValueError(f"nothing to slice: {self.pending} tokens pending, limit {limit_tokens}")
        return Slice(
            token_ids=tuple(self.token_ids[begin:end]),
            start=begin,
            blocks=tuple(self.blocks),
            wants_logits=end == known,
        )

    def advance(self, tokens: int) -> None:
        """Note that the KV of `tokens` more tokens is in the blocks."""
        if not 0 <= tokens <= self.pending:
            raise ValueError(f"cannot advance by {tokens} tokens: {self.pending} are pending")
        self.computed += tokens

    def append(self, token: int) -> None:
        """Add a sampled token at the end; its KV is pending."""
        self.token_ids.append(token)

    def without_blocks(self) -> TokenSequence:
        """The same tokens, all of them to be computed again."""
        return TokenSequence(token_ids=self.token_ids, block_keys=self.block_keys)
