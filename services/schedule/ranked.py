"""A queue of keys in order of rank, equal ranks in order of entry: what every policy keeps its requests in.

Its front is a sorted list, the rest a heap, so that a step touches what it takes and O(log n) for what enters or
leaves, however many wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from typing import Final

FRONT: Final = 256
"""How long the sorted part grows by entries at its end: about a step's batch."""

_Entry = tuple[float, int, str]


class RankedQueue:
    """Smallest rank first. Removed entries stay in the heap until they come up or outnumber the others."""

    def __init__(self) -> None:
        self._front: list[_Entry] = []  # sorted; no live entry of the rest is smaller than its last
        self._rest: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._entered = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def add(self, key: str, rank: float) -> None:
        """ValueError when it is here already."""
        if key in self._entries:
            raise ValueError(f"{key!r} is queued already")
        self._entered += 1
        self._entries[key] = entry = (rank, self._entered, key)
        if self._front and entry < self._front[-1]:
            insort(self._front, entry)
        elif not self._rest and len(self._front) < FRONT:
            self._front.append(entry)
        else:
            heappush(self._rest, entry)

    def remove(self, key: str) -> None:
        """KeyError when it is not here."""
        entry = self._entries.pop(key)
        if self._front and entry <= self._front[-1]:
            del self._front[bisect_left(self._front, entry)]
        elif len(self._rest) > 2 * len(self._entries) + FRONT:
            self._rest = [one for one in self._rest if self._entries.get(one[2]) is one]
            heapify(self._rest)

    def rank(self, key: str) -> float:
        """KeyError when it is not here."""
        return self._entries[key][0]

    def first(self, count: int) -> list[str]:
        """The first `count` keys, or all."""
        while len(self._front) < count and self._rest:
            entry = heappop(self._rest)
            if self._entries.get(entry[2]) is entry:
                self._front.append(entry)
        return [entry[2] for entry in self._front[:count]]
