"""Who waits too long: requests by the time at which they are to be promoted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice


class Due:
    """One place a key at most. `due_s` says when it is due by what is known now, which may only become later than it
    was when the key was added; infinite: not at all, and its place goes.

    Those that are due at one moment, as all that arrived or ran together are, have one entry in the heap of times.
    """

    def __init__(self, due_s: Callable[[str], float]) -> None:
        self._due_s = due_s
        self._times: list[float] = []  # a heap of the keys of `_at`
        self._at: dict[float, dict[str, None]] = {}
        self._added: dict[str, float] = {}  # keys, and the times that they are under

    def add(self, key: str, due_s: float) -> None:
        """Watches it, unless it is watched already or is never due."""
        if key in self._added or due_s == float("inf"):
            return
        self._added[key] = due_s
        if due_s not in self._at:
            self._at[due_s] = {}
            heappush(self._times, due_s)
        self._at[due_s][key] = None

    def discard(self, key: str) -> None:
        """Forgets it. Its time stays until it comes, or until times of nobody outnumber keys."""
        if (due_s := self._added.pop(key, None)) is None:
            return
        del self._at[due_s][key]
        if len(self._times) > 2 * len(self._added) + 64:
            self._at = {due_s: keys for due_s, keys in self._at.items() if keys}
            self._times = list(self._at)
            heapify(self._times)

    def next_s(self) -> float:
        """No key is due before; infinite when there is none."""
        return self._times[0] if self._times else float("inf")

    def take(self, now_s: float) -> Iterator[str]:
        """Removes and gives those that are due, the longest due first, equally long ones by key."""
        while self._times and self._times[0] <= now_s:
            due_s = heappop(self._times)
            for key in sorted(self._at.pop(due_s)):
                del self._added[key]
                if (later_s := self._due_s(key)) > due_s:  # it has run since
                    self.add(key, later_s)
                else:
                    yield key

    def soonest(self, limit: int, until_s: float) -> list[str]:
        """The first `limit` keys until then, those that have become later included."""
        found: list[str] = []
        front = [(self._times[0], 0)] if self._times else []
        while front and len(found) < limit and front[0][0] <= until_s:
            due_s, index = heappop(front)
            found += islice(self._at[due_s], limit - len(found))
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(self._times):
                    heappush(front, (self._times[child], child))
        return found
