"""A queue of keys in order of rank, equal ranks in order of entry: what every policy keeps its requests in.

Its front is a sorted list. What enters behind it in order, as nearly all of a feedback queue's level does, is a line;
only the rest is a heap. So a step touches what it takes and O(1) for what enters or leaves, at worst O(log n), however
many wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from heapq import heapify, heappop, heappush
from typing import Final

FRONT: Final = 256
"""How long the sorted part grows by entries at its end: about a step's batch."""

_Entry = tuple[float, int, str]


class RankedQueue:
    """Smallest rank first. Entries removed from line and heap stay there until they come up or outnumber the others."""

    def __init__(self) -> None:
        self._front: list[_Entry] = []  # sorted; no live entry of line and heap is smaller than its last
        self._line: deque[_Entry] = deque()  # sorted, too
        self._heap: list[_Entry] = []
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
        front, line = self._front, self._line
        if front and entry < front[-1]:
            insort(front, entry)
        elif not line and not self._heap and len(front) < FRONT:
            front.append(entry)
        elif not line or entry > line[-1]:
            line.append(entry)
        else:
            heappush(self._heap, entry)

    def remove(self, key: str) -> None:
        """KeyError when it is not here."""
        entries, front, line = self._entries, self._front, self._line
        entry = entries.pop(key)
        if front and entry <= front[-1]:
            del front[bisect_left(front, entry)]
        elif line and entry is line[0]:  # the one that has waited longest, as most that leave from there
            while line and entries.get(line[0][2]) is not line[0]:
                line.popleft()
        elif len(line) + len(self._heap) > 2 * len(entries) + FRONT:
            self._line = deque(filter(self._lives, line))
            self._heap = list(filter(self._lives, self._heap))
            heapify(self._heap)

    def rank(self, key: str) -> float:
        """KeyError when it is not here."""
        return self._entries[key][0]

    def first(self, count: int) -> list[str]:
        """The first `count` keys, or all."""
        front, line, heap = self._front, self._line, self._heap
        while len(front) < count and (line or heap):
            entry = line.popleft() if not heap or (line and line[0] < heap[0]) else heappop(heap)
            if self._lives(entry):
                front.append(entry)
        return [key for _, _, key in front[:count]]

    def _lives(self, entry: _Entry) -> bool:
        return self._entries.get(entry[2]) is entry
