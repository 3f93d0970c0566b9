"""Who waits too long: requests by the time at which they are to be promoted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

_Entry = tuple[float, str]


class Due:
    """One entry a key at most. `due_s` says when it is due by what is known now, which may only become later than it
    was when the key was added; infinite: not at all, and its entry goes.
    """

    def __init__(self, due_s: Callable[[str], float]) -> None:
        self._due_s = due_s
        self._heap: list[_Entry] = []
        self._keys: set[str] = set()

    def add(self, key: str) -> None:
        """Watches it, unless it is watched already or is never due."""
        due_s = self._due_s(key)
        if key not in self._keys and due_s < float("inf"):
            self._keys.add(key)
            heappush(self._heap, (due_s, key))

    def discard(self, key: str) -> None:
        """Forgets it. Its entry stays in the heap until it comes up or such entries outnumber the others."""
        self._keys.discard(key)
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = [(self._due_s(key), key) for key in self._keys]
            heapify(self._heap)

    def next_s(self) -> float:
        """No key is due before; infinite when there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def take(self, now_s: float) -> Iterator[str]:
        """Removes and gives those that are due, the longest due first."""
        while self._heap and self._heap[0][0] <= now_s:
            due_s, key = heappop(self._heap)
            if key not in self._keys:
                continue
            self._keys.remove(key)
            if self._due_s(key) > due_s:  # it has run since
                self.add(key)
            else:
                yield key

    def soonest(self, limit: int, until_s: float) -> list[_Entry]:
        """The first `limit` entries until then, those of keys that have become later or have gone included."""
        found: list[_Entry] = []
        front = [(self._heap[0], 0)] if self._heap else []
        while front and len(found) < limit and front[0][0][0] <= until_s:
            entry, index = heappop(front)
            found.append(entry)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(self._heap):
                    heappush(front, (self._heap[child], child))
        return [entry for entry in found if entry[1] in self._keys]
