"""Which blocks hold known content, under which key; and which of those nobody references, in the order of their use.

Pure and not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

BlockKey = bytes
"""Names what a full block holds and everything before it; opaque here. Equal keys mean equal content."""


class Contents:
    """A one-to-one map of keys and blocks. Blocks in it are in use or idle; idle ones can be evicted."""

    def __init__(self) -> None:
        self._block: dict[BlockKey, int] = {}
        self._key: dict[int, BlockKey] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def idle(self) -> int:
        """Idle blocks."""
        return len(self._idle)

    def __contains__(self, block: int) -> bool:
        return block in self._key

    def __iter__(self) -> Iterator[tuple[BlockKey, int]]:
        return iter(self._block.items())

    def idle_blocks(self) -> Iterator[int]:
        """The idle ones, in the order in which they will be evicted."""
        return iter(self._idle)

    def block(self, key: BlockKey) -> int | None:
        """The block that holds what the key names; None when none is known."""
        return self._block.get(key)

    def is_idle(self, block: int) -> bool:
        """Whether the block is known and nobody references it."""
        return block in self._idle

    def name(self, block: int, key: BlockKey) -> int:
        """Notes what a block in use holds, unless another block is known to hold it; returns the one that is known."""
        known = self._block.setdefault(key, block)
        if known == block:
            self._key[block] = key
        return known

    def use(self, block: int) -> None:
        """A known block is referenced."""
        self._idle.pop(block, None)

    def rest(self, block: int) -> None:
        """A known block is referenced no longer, and was used just now."""
        self._idle[block] = None
        self._idle.move_to_end(block)

    def evict(self) -> int:
        """Forgets the least recently used idle block and returns it. KeyError: none is idle."""
        block, _ = self._idle.popitem(last=False)
        del self._block[self._key.pop(block)]
        return block

    def clear(self) -> tuple[int, ...]:
        """Forgets everything and returns the blocks that were idle."""
        idle = tuple(self._idle)
        self._idle.clear()
        self._block.clear()
        self._key.clear()
        return idle
