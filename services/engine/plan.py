"""From the slices of one step to index arrays: where every new token's KV is written, and what every token may see.

Pure NumPy. A *slot* is the index of one token's place in one layer of the arena: `block * block_tokens + offset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.engine.errors import InvalidSlice

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Tokens of one sequence to compute in one step.

    `start` is the position of the first token; the KV of positions [0, start) is in `blocks` already. `blocks` is the
    sequence's block table from position 0, long enough for the new tokens. The logits of the last token are computed
    when `wants_logits`, those of all its tokens when `wants_all_logits`, whatever the other says.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    wants_logits: bool
    wants_all_logits: bool = False

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def logit_count(self) -> int:
        """Rows of logits that it gets, in order of its tokens."""
        return len(self.token_ids) if self.wants_all_logits else int(self.wants_logits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A sequence with several new tokens: rows [row, row + tokens) of the step, seeing `slots` (positions [0, end))."""

    row: int
    tokens: int
    slots: Indices  # (end,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Singles:
    """Sequences with one new token each, of similar length, attended together.

    A row of `slots` shorter than the longest is padded with its own first slot: that one holds finite numbers, where an
    arbitrary slot may hold anything, and a masked NaN would still spoil the sum.
    """

    rows: Indices  # (n,) rows of the step
    lengths: Indices  # (n,) tokens that the row's token sees, itself included
    slots: Indices  # (n, max(lengths))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step, flattened: tokens of all slices one after the other, without padding."""

    token_ids: Indices  # (rows,)
    positions: Indices  # (rows,)
    write_slots: Indices  # (rows,)
    logit_rows: Indices  # (logit rows of all slices,)
    chunks: tuple[Chunk, ...]
    singles: tuple[Singles, ...]


def plan_step(slices: Sequence[Slice], *, block_tokens: int, blocks: int, vocab: int) -> StepPlan:
    """Lay out one step over an arena of `blocks` blocks. Raises InvalidSlice instead of touching somebody else's KV."""
    slots = [_slots(s, block_tokens, blocks) for s in slices]
    lengths = np.array([len(s.token_ids) for s in slices], dtype=np.int64)
    ends = np.cumsum(lengths)
    rows = ends - lengths
    token_ids = np.concatenate([np.asarray(s.token_ids, dtype=np.int64) for s in slices])
    if token_ids.min() < 0 or token_ids.max() >= vocab:
        raise InvalidSlice(f"token ids must lie in [0, {vocab})")
    write_slots = np.concatenate([own[s.start :] for s, own in zip(slices, slots, strict=True)])
    if len(np.unique(write_slots)) != len(write_slots):
        raise InvalidSlice("two tokens of one step would be written to the same place")
    return StepPlan(
        token_ids=token_ids,
        positions=np.concatenate([np.arange(s.start, s.end, dtype=np.int64) for s in slices]),
        write_slots=write_slots,
        logit_rows=np.concatenate([np.arange(end - s.logit_count, end) for s, end in zip(slices, ends, strict=True)]),
        chunks=tuple(
            Chunk(row=int(row), tokens=len(s.token_ids), slots=own)
            for s, row, own in zip(slices, rows, slots, strict=True)
            if len(s.token_ids) > 1
        ),
        singles=_group_singles(
            [(int(row), own) for s, row, own in zip(slices, rows, slots, strict=True) if len(s.token_ids) == 1]
        ),
    )


def _slots(s: Slice, block_tokens: int, blocks: int) -> Indices:
    """The slots of positions [0, end) of a slice's sequence."""
    if not s.token_ids or s.start < 0:
        raise InvalidSlice(f"a slice needs tokens and a position: {len(s.token_ids)} tokens from {s.start}")
    if len(s.blocks) * block_tokens < s.end:
        raise InvalidSlice(f"{len(s.blocks)} blocks of {block_tokens} tokens cannot hold {s.end} tokens")
    table = np.asarray(s.blocks, dtype=np.int64)
    if table.min() < 0 or table.max() >= blocks:
        raise InvalidSlice(f"block ids must lie in [0, {blocks})")
    every = table[:, None] * block_tokens + np.arange(block_tokens, dtype=np.int64)
    return every.reshape(-1)[: s.end]


def _group_singles(singles: Sequence[tuple[int, Indices]]) -> tuple[Singles, ...]:
    """Group by the power of two above the length, so that padding never doubles the work of a group."""
    groups: dict[int, list[tuple[int, Indices]]] = {}
    for row, slots in singles:
        groups.setdefault((len(slots) - 1).bit_length(), []).append((row, slots))
    return tuple(_singles(groups[size]) for size in sorted(groups))


def _singles(members: Sequence[tuple[int, Indices]]) -> Singles:
    lengths = np.array([len(slots) for _, slots in members], dtype=np.int64)
    padded = np.empty((len(members), int(lengths.max())), dtype=np.int64)
    for i, (_, slots) in enumerate(members):
        padded[i, : len(slots)] = slots
        padded[i, len(slots) :] = slots[0]
    return Singles(rows=np.array([row for row, _ in members], dtype=np.int64), lengths=lengths, slots=padded)
