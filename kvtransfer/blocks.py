"""Accounting of a pool of KV blocks: who owns which block, in which state, and what is known to be in it.

Life of an owner's blocks here: allocate → HELD → (lease → LEASED) → free. When a writer may still touch them at the
time they are given up, drain → DRAINING → drained. A cancel or a peer's death changes nothing in this: DRAINING
blocks come back only when the writer has said that it is done.

Life of a block: empty → referenced by its owner → empty. Once it is full its owner may `register` what it holds, under
a key; it is never written again. Then later owners share it instead of getting an empty one, and when nobody references
it any more it stays *cached*: free, its content kept. Allocation takes empty blocks first, then evicts cached ones,
least recently used first, and of one sequence the later blocks before the earlier ones; several at once, so that runs
of empty blocks come about.

Pure and not thread-safe: one thread owns a pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvtransfer.contents import BlockKey, Contents
from kvtransfer.errors import BlockStateError, OutOfBlocks
from kvtransfer.free_runs import FreeRuns

EVICTION_SHARE: Final = 8
"""Eviction goes through an eighth of the pool at once. Block by block there would be no choice among empty blocks, and
owners would be scattered: under heavy churn the mean run of neighbours was 2.0 blocks, and 9.5 with an eighth.
"""


class BlockState(Enum):
    """What an owner's blocks are."""

    HELD = "held"
    LEASED = "leased"
    DRAINING = "draining"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCounts:
    """Counts of blocks; free + held + leased + swapped == total. Draining blocks are counted as held.

    A block of several owners counts once: as leased when all of them lease it, else as held. `cached` of the free ones
    hold a known content, which is lost when they are allocated. `swapped` are those in host memory, which `total`
    counts beside all of the pool's: a pool by itself has none, total − swapped is its size.
    """

    total: int
    free: int
    held: int
    leased: int
    swapped: int = 0
    cached: int = 0


@dataclass(slots=True)
class _Holding:
    """An owner's blocks in the order of its sequence; `keys` name the first ones' content, unless it is doubted."""

    state: BlockState
    blocks: list[int]
    keys: list[BlockKey] = field(default_factory=list)
    doubted: bool = False


class BlockPool:
    """Owns the ids [0, total). Gives neighbours where it can, so that an owner's blocks tend to be contiguous."""

    def __init__(self, total: int) -> None:
        if total < 0:
            raise ValueError(f"total must not be negative, is {total}")
        self._total = total
        self._empty = FreeRuns(total)
        self._contents = Contents()
        self._holdings: dict[str, _Holding] = {}
        self._references = [0] * total  # owners, by block
        self._leases = [0] * total  # those of them that lease it, by block
        self._leased = 0  # blocks that all their owners lease

    def match(self, keys: Iterable[BlockKey]) -> int:
        """How many of the keys, from the first on, name the content of a block here."""
        count = 0
        for key in keys:
            if self._contents.block(key) is None:
                break
            count += 1
        return count

    def cost(self, blocks: int, keys: Sequence[BlockKey] = ()) -> int:
        """How many of the free blocks `allocate` with the same arguments would take."""
        return self._taken_from_free(blocks, self._known(keys))

    def can_allocate(self, blocks: int, keys: Sequence[BlockKey] = ()) -> bool:
        """Says whether `allocate` with the same arguments would succeed."""
        return self.cost(blocks, keys) <= self._free

    def allocate(self, blocks: int, owner: str, keys: Sequence[BlockKey] = ()) -> tuple[int, ...]:
        """Gives `owner`, who has none yet, that many blocks, of which the first len(keys) are those known by the keys.

        The others are the owner's alone, and nothing is known of what is in them. OutOfBlocks: not enough are free, and
        nothing was given. BlockStateError: a key is not known. ValueError: more keys than blocks.
        """
        if owner in self._holdings:
            raise BlockStateError(f"{owner!r} has blocks already; extend them")
        shared = self._known(keys)
        self._require_free(self._taken_from_free(blocks, shared))
        for block in shared:
            self._contents.use(block)
            self._refer(block)
        taken = self._take(blocks - len(shared), after=shared[-1] if shared else None)
        self._holdings[owner] = _Holding(BlockState.HELD, [*shared, *taken], list(keys))
        return (*shared, *taken)

    def extend(self, owner: str, blocks: int) -> tuple[int, ...]:
        """Gives `owner` that many more held blocks and returns only the new ones. OutOfBlocks as in allocate."""
        holding = self._require(owner, BlockState.HELD)
        self._require_free(self._taken_from_free(blocks, ()))
        taken = self._take(blocks, after=holding.blocks[-1] if holding.blocks else None)
        holding.blocks.extend(taken)
        return tuple(taken)

    def register(self, owner: str, keys: Sequence[BlockKey]) -> None:
        """Names the content of the owner's next blocks, after those named already. They must be full, and nobody may
        write to them again. Does nothing for an owner whose content is doubted. ValueError: it has fewer blocks.
        """
        holding = self._require(owner, BlockState.HELD)
        if holding.doubted:
            return
        first, end = len(holding.keys), len(holding.keys) + len(keys)
        if end > len(holding.blocks):
            raise ValueError(f"{end} blocks of {owner!r} cannot be registered, it has {len(holding.blocks)}")
        for block, key in zip(holding.blocks[first:end], keys, strict=True):
            self._contents.name(block, key)
        holding.keys.extend(keys)

    def doubt_contents(self) -> None:
        """Something wrong was found in a block, and nobody knows what it spoiled: no content that is known now, and
        none that its owners still make from it, is shared any more.
        """
        self._empty.give(self._contents.clear())
        for holding in self._holdings.values():
            holding.keys.clear()
            holding.doubted = True

    def lease(self, owner: str) -> None:
        """Moves the owner's held blocks to leased: kept only until a receiver has acknowledged them."""
        holding = self._require(owner, BlockState.HELD)
        holding.state = BlockState.LEASED
        for block in holding.blocks:
            self._leases[block] += 1
            self._leased += self._leases[block] == self._references[block]

    def free(self, owner: str) -> tuple[int, ...]:
        """Takes all blocks of an owner, held or leased, back. What others share stays theirs."""
        self._unlease(self._require(owner, BlockState.HELD, BlockState.LEASED))
        return self._give_back(owner)

    def drain(self, owner: str) -> None:
        """Gives the owner's blocks up while a writer may still touch them: nobody gets them before `drained`."""
        holding = self._require(owner, BlockState.HELD, BlockState.LEASED)
        self._unlease(holding)
        holding.state = BlockState.DRAINING

    def drained(self, owner: str) -> tuple[int, ...]:
        """Takes draining blocks back: no writer touches them any more."""
        self._require(owner, BlockState.DRAINING)
        return self._give_back(owner)

    def blocks(self, owner: str) -> tuple[int, ...]:
        """The owner's blocks, in the order in which they were given."""
        return tuple(self._require(owner, *BlockState).blocks)

    def exclusive(self, owner: str) -> int:
        """How many blocks would become free with the owner's: those that nobody shares."""
        return sum([self._references[block] == 1 for block in self._require(owner, *BlockState).blocks])

    def state(self, owner: str) -> BlockState | None:
        """State of the owner's blocks; None when it has none."""
        holding = self._holdings.get(owner)
        return holding.state if holding else None

    def owners(self) -> tuple[str, ...]:
        """Everybody who owns blocks now."""
        return tuple(self._holdings)

    def counts(self) -> BlockCounts:
        """Counts of this moment."""
        free = self._free
        held = self._total - free - self._leased
        cached = self._contents.idle
        return BlockCounts(total=self._total, free=free, held=held, leased=self._leased, cached=cached)

    def check(self) -> None:
        """Raises BlockStateError unless every block is either empty, cached or referenced, by those who own it."""
        owners = Counter(block for holding in self._holdings.values() for block in holding.blocks)
        leases = Counter(block for holding in self._holdings.values() for block in _leased_by(holding))
        every = range(self._total)
        if any((owners[block], leases[block]) != (self._references[block], self._leases[block]) for block in every):
            raise BlockStateError("the references do not match the owners")
        if sorted([*self._empty, *self._contents.idle_blocks(), *owners]) != [*every]:
            raise BlockStateError("a block is lost, foreign, or both free and owned")
        if self._leased != sum(owners[block] == count for block, count in leases.items()):
            raise BlockStateError(f"{self._leased} blocks are counted as leased by all their owners")
        for owner, holding in self._holdings.items():
            if len(set(holding.blocks)) != len(holding.blocks) or len(holding.keys) > len(holding.blocks):
                raise BlockStateError(f"{owner!r} has a block twice, or names more than it has")
        known = {block for _, block in self._contents}
        if known & set(self._empty) or not known >= set(self._contents.idle_blocks()):
            raise BlockStateError("an empty block has content, or a cached one has none")
        self._empty.check()

    @property
    def _free(self) -> int:
        return len(self._empty) + self._contents.idle

    def _known(self, keys: Sequence[BlockKey]) -> list[int]:
        blocks = [block for key in keys if (block := self._contents.block(key)) is not None]
        if len(blocks) < len(keys):
            raise BlockStateError(f"{len(keys) - len(blocks)} of {len(keys)} keys are not known")
        return blocks

    def _taken_from_free(self, blocks: int, shared: Sequence[int]) -> int:
        """How many blocks are free now and not afterwards, when an owner gets `blocks` of which `shared` are known."""
        if blocks < 0:
            raise ValueError(f"blocks must not be negative, is {blocks}")
        if len(shared) > blocks:
            raise ValueError(f"{len(shared)} known blocks are more than the {blocks} asked for")
        return blocks - len(shared) + sum(map(self._contents.is_idle, shared))

    def _require_free(self, taken: int) -> None:
        if taken > self._free:
            raise OutOfBlocks(f"{taken} free blocks are needed, {self._free} of {self._total} are free")

    def _take(self, blocks: int, after: int | None) -> list[int]:
        if (short := blocks - len(self._empty)) > 0:
            batch = min(max(short, self._total // EVICTION_SHARE), self._contents.idle)
            self._empty.give([self._contents.evict() for _ in range(batch)])
        taken = self._empty.take(blocks, after=after)
        for block in taken:
            self._refer(block)
        return taken

    def _refer(self, block: int) -> None:
        self._leased -= 0 < self._leases[block] == self._references[block]
        self._references[block] += 1

    def _unlease(self, holding: _Holding) -> None:
        for block in _leased_by(holding):
            self._leased -= self._leases[block] == self._references[block]
            self._leases[block] -= 1

    def _give_back(self, owner: str) -> tuple[int, ...]:
        holding = self._holdings.pop(owner)
        for block in holding.blocks:
            self._references[block] -= 1
            self._leased += 0 < self._leases[block] == self._references[block]
        # Last block first, so that it is evicted first. Where another block is known for the same content, that one was
        # used, too: a prefix never goes before what comes after it.
        for block, key in zip(reversed(holding.blocks[: len(holding.keys)]), reversed(holding.keys), strict=True):
            known = self._contents.name(block, key)
            if self._references[known] == 0:
                self._contents.rest(known)
        self._empty.give(b for b in holding.blocks if not self._references[b] and b not in self._contents)
        return tuple(holding.blocks)

    def _require(self, owner: str, *states: BlockState) -> _Holding:
        holding = self._holdings.get(owner)
        if holding is None:
            raise BlockStateError(f"{owner!r} owns no blocks")
        if holding.state not in states:
            raise BlockStateError(f"the blocks of {owner!r} are {holding.state.value}")
        return holding


def _leased_by(holding: _Holding) -> Sequence[int]:
    return holding.blocks if holding.state is BlockState.LEASED else ()
