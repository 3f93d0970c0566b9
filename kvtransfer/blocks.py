"""Accounting of a pool of KV blocks: who owns which block, and in which state.

Life of an owner's blocks here: allocate → HELD → (lease → LEASED) → free. When a writer may still touch them at the
time they are given up, drain → DRAINING → drained. A cancel or a peer's death changes nothing in this: DRAINING
blocks come back only when the writer has said that it is done.

Pure and not thread-safe: one thread owns a pool.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvtransfer.errors import BlockStateError, OutOfBlocks


class BlockState(Enum):
    """What an owner's blocks are."""

    HELD = "held"
    LEASED = "leased"
    DRAINING = "draining"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCounts:
    """Counts of blocks; free + held + leased + swapped == total. Draining blocks are counted as held."""

    total: int
    free: int
    held: int
    leased: int
    swapped: int = 0


@dataclass(slots=True)
class _Holding:
    state: BlockState
    blocks: list[int]


class BlockPool:
    """Owns the ids [0, total). Gives the lowest free ones first, so that an owner's blocks tend to be contiguous."""

    def __init__(self, total: int) -> None:
        if total < 0:
            raise ValueError(f"total must not be negative, is {total}")
        self._total = total
        self._free = list(range(total))  # a heap; a sorted list is one
        self._holdings: dict[str, _Holding] = {}

    def can_allocate(self, blocks: int) -> bool:
        """Says whether that many blocks are free."""
        return blocks <= len(self._free)

    def allocate(self, blocks: int, owner: str) -> tuple[int, ...]:
        """Gives `owner`, who has none yet, that many blocks. OutOfBlocks: not enough are free, and nothing was
        given.
        """
        if owner in self._holdings:
            raise BlockStateError(f"{owner!r} has blocks already; extend them")
        taken = self._take(blocks)
        self._holdings[owner] = _Holding(BlockState.HELD, taken)
        return tuple(taken)

    def extend(self, owner: str, blocks: int) -> tuple[int, ...]:
        """Gives `owner` that many more held blocks and returns only the new ones. OutOfBlocks as in allocate."""
        holding = self._require(owner, BlockState.HELD)
        taken = self._take(blocks)
        holding.blocks.extend(taken)
        return tuple(taken)

    def lease(self, owner: str) -> None:
        """Moves the owner's held blocks to leased: kept only until a receiver has acknowledged them."""
        self._require(owner, BlockState.HELD).state = BlockState.LEASED

    def free(self, owner: str) -> tuple[int, ...]:
        """Takes all blocks of an owner, held or leased, back."""
        self._require(owner, BlockState.HELD, BlockState.LEASED)
        return self._give_back(owner)

    def drain(self, owner: str) -> None:
        """Gives the owner's blocks up while a writer may still touch them: nobody gets them before `drained`."""
        self._require(owner, BlockState.HELD, BlockState.LEASED).state = BlockState.DRAINING

    def drained(self, owner: str) -> tuple[int, ...]:
        """Takes draining blocks back: no writer touches them any more."""
        self._require(owner, BlockState.DRAINING)
        return self._give_back(owner)

    def blocks(self, owner: str) -> tuple[int, ...]:
        """The owner's blocks, in the order in which they were given."""
        return tuple(self._require(owner, *BlockState).blocks)

    def state(self, owner: str) -> BlockState | None:
        """State of the owner's blocks; None when it has none."""
        holding = self._holdings.get(owner)
        return holding.state if holding else None

    def owners(self) -> tuple[str, ...]:
        """Everybody who owns blocks now."""
        return tuple(self._holdings)

    def counts(self) -> BlockCounts:
        """Counts of this moment."""
        leased = self._count(BlockState.LEASED)
        held = self._count(BlockState.HELD) + self._count(BlockState.DRAINING)
        return BlockCounts(total=self._total, free=len(self._free), held=held, leased=leased)

    def check(self) -> None:
        """Raises BlockStateError unless every block is either free or owned by exactly one owner."""
        counts = self.counts()
        if counts.free + counts.held + counts.leased + counts.swapped != counts.total:
            raise BlockStateError(f"the counts do not add up: {counts}")
        seen: set[int] = set()
        for name, blocks in self._groups():
            for block in blocks:
                if block in seen:
                    raise BlockStateError(f"block {block} of {name} is owned twice")
                seen.add(block)
        if seen != set(range(self._total)):
            raise BlockStateError(f"blocks {sorted(seen ^ set(range(self._total)))} are lost or foreign")

    def _groups(self) -> Iterable[tuple[str, list[int]]]:
        yield "the free list", self._free
        for owner, holding in self._holdings.items():
            yield owner, holding.blocks

    def _count(self, state: BlockState) -> int:
        return sum(len(holding.blocks) for holding in self._holdings.values() if holding.state is state)

    def _take(self, blocks: int) -> list[int]:
        if blocks < 0:
            raise ValueError(f"blocks must not be negative, is {blocks}")
        if blocks > len(self._free):
            raise OutOfBlocks(f"{blocks} blocks were asked for, {len(self._free)} of {self._total} are free")
        return [heapq.heappop(self._free) for _ in range(blocks)]

    def _give_back(self, owner: str) -> tuple[int, ...]:
        blocks = self._holdings.pop(owner).blocks
        for block in blocks:
            heapq.heappush(self._free, block)
        return tuple(blocks)

    def _require(self, owner: str, *states: BlockState) -> _Holding:
        holding = self._holdings.get(owner)
        if holding is None:
            raise BlockStateError(f"{owner!r} owns no blocks")
        if holding.state not in states:
            raise BlockStateError(f"the blocks of {owner!r} are {holding.state.value}")
        return holding
