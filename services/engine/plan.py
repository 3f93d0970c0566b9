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
    """Sequences with one new token each."""

    rows: Indices  # (n,) rows of the step
    lengths: Indices  # (n,) tokens that the row's token sees, itself included
    tables: Indices  # block tables of all of them, one after the other
    starts: Indices  # (n,) where each one's table begins


@dataclass(frozen=True, kw_only=True, slots=True)
class SinglesGroup:
    """Sequences with one new token each, of similar length, whose slots fill a rectangle.

    A row of `slots` shorter than the longest is padded with its own first slot: that one holds finite numbers, where an
    arbitrary slot may hold anything, and a masked NaN would still spoil the sum.
    """

    rows: Indices  # (n,) rows of the step
    lengths: Indices  # (n,) as in Singles
    slots: Indices  # (n, max(lengths))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step, flattened: tokens of all slices one after the other, without padding."""

    token_ids: Indices  # (rows,)
    positions: Indices  # (rows,)
    write_slots: Indices  # (rows,)
    logit_rows: Indices  # (logit rows of all slices,)
    chunks: tuple[Chunk, ...]
    singles: Singles | None


def plan_step(slices: Sequence[Slice], *, block_tokens: int, blocks: int, vocab: int) -> StepPlan:
    """Lay out one step over an arena of `blocks` blocks. Raises InvalidSlice instead of touching somebody else's KV."""
    tables = [_table(s, block_tokens, blocks) for s in slices]
    lengths = np.array([len(s.token_ids) for s in slices], dtype=np.int64)
    ends = np.cumsum(lengths)
    rows = ends - lengths
    token_ids = np.concatenate([np.asarray(s.token_ids, dtype=np.int64) for s in slices])
    if token_ids.min() < 0 or token_ids.max() >= vocab:
        raise InvalidSlice(f"token ids must lie in [0, {vocab})")
    positions = np.concatenate([np.arange(s.start, s.end, dtype=np.int64) for s in slices])
    write_slots = np.concatenate(
        [token_slots(table, s.start, s.end, block_tokens) for s, table in zip(slices, tables, strict=True)]
    )
    if len(np.unique(write_slots)) != len(write_slots):
        raise InvalidSlice("two tokens of one step would be written to the same place")
    return StepPlan(
        token_ids=token_ids,
        positions=positions,
        write_slots=write_slots,
        logit_rows=np.concatenate([np.arange(end - s.logit_count, end) for s, end in zip(slices, ends, strict=True)]),
        chunks=tuple(
            Chunk(row=int(row), tokens=len(s.token_ids), slots=token_slots(table, 0, s.end, block_tokens))
            for s, row, table in zip(slices, rows, tables, strict=True)
            if len(s.token_ids) > 1
        ),
        singles=_singles(
            [
                (int(row), s.end, table)
                for s, row, table in zip(slices, rows, tables, strict=True)
                if len(s.token_ids) == 1
            ]
        ),
    )


def group_singles(singles: Singles, block_tokens: int) -> tuple[SinglesGroup, ...]:
    """Groups by the power of two above the length, so that padding never doubles the work of a group."""
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(singles.lengths.tolist()):
        groups.setdefault((length - 1).bit_length(), []).append(i)
    return tuple(_group(singles, groups[size], block_tokens) for size in sorted(groups))


def _table(s: Slice, block_tokens: int, blocks: int) -> Indices:
    """The blocks of positions [0, end) of a slice's sequence."""
    if not s.token_ids or s.start < 0:
        raise InvalidSlice(f"a slice needs tokens and a position: {len(s.token_ids)} tokens from {s.start}")
    if len(s.blocks) * block_tokens < s.end:
        raise InvalidSlice(f"{len(s.blocks)} blocks of {block_tokens} tokens cannot hold {s.end} tokens")
    table = np.asarray(s.blocks[: -(-s.end // block_tokens)], dtype=np.int64)
    if table.min() < 0 or table.max() >= blocks:
        raise InvalidSlice(f"block ids must lie in [0, {blocks})")
    return table


def token_slots(table: Indices, start: int, end: int, block_tokens: int) -> Indices:
    """The slots of positions [start, end)."""
    positions = np.arange(start, end, dtype=np.int64)
    return table[positions // block_tokens] * block_tokens + positions % block_tokens


def _singles(members: Sequence[tuple[int, int, Indices]]) -> Singles | None:
    if not members:
        return None
    sizes = np.array([len(table) for _, _, table in members], dtype=np.int64)
    return Singles(
        rows=np.array([row for row, _, _ in members], dtype=np.int64),
        lengths=np.array([end for _, end, _ in members], dtype=np.int64),
        tables=np.concatenate([table for _, _, table in members]),
        starts=np.cumsum(sizes) - sizes,
    )


def _group(singles: Singles, members: Sequence[int], block_tokens: int) -> SinglesGroup:
    lengths = singles.lengths[members]
    slots = np.empty((len(members), int(lengths.max())), dtype=np.int64)
    for i, (start, length) in enumerate(zip(singles.starts[members].tolist(), lengths.tolist(), strict=True)):
        slots[i, :length] = token_slots(singles.tables[start:], 0, length, block_tokens)
        slots[i, length:] = slots[i, 0]
    return SinglesGroup(rows=singles.rows[members], lengths=lengths, slots=slots)
