"""The free blocks of a pool as runs of neighbours, taken so that what an owner gets and what is left stays whole.

A run is kept under its first and under its last block, so that blocks that come back join both neighbours at once, and
in a list sorted by length, in which the best fit is found by bisection.

Pure and not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import pairwise


class FreeRuns:
    """A set of block ids, [0, total) at first. Adjacent ids are always one run."""

    def __init__(self, total: int) -> None:
        self._blocks = 0
        self._length: dict[int, int] = {}  # by a run's first block
        self._first: dict[int, int] = {}  # by a run's last block
        self._by_length: list[tuple[int, int]] = []  # (length, first block), ascending
        if total:
            self._add(0, total)

    def __len__(self) -> int:
        return self._blocks

    def __iter__(self) -> Iterator[int]:
        for first, length in self._length.items():
            yield from range(first, first + length)

    def take(self, blocks: int, *, after: int | None = None) -> list[int]:
        """Takes that many, which must be there: first the run right after the block `after`, then the shortest run that
        holds the rest, then, where none does, the longest ones.
        """
        taken: list[int] = []
        if after is not None and after + 1 in self._length:
            taken += self._cut(after + 1, blocks)
        pieces: list[range] = []
        missing = blocks - len(taken)
        while missing:
            fit = bisect_left(self._by_length, (missing, 0))
            _, first = self._by_length[min(fit, len(self._by_length) - 1)]
            pieces.append(self._cut(first, missing))
            missing -= len(pieces[-1])
        for piece in sorted(pieces, key=lambda piece: piece.start):
            taken += piece
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Puts blocks that are not in it back."""
        run = range(0)
        for block in sorted(blocks):
            if run and block == run.stop:
                run = range(run.start, block + 1)
                continue
            self._join(run)
            run = range(block, block + 1)
        self._join(run)

    def check(self) -> None:
        """Raises ValueError unless the three views of the runs agree and no two runs touch."""
        runs = sorted(self._length.items())
        if sorted((length, first) for first, length in runs) != self._by_length:
            raise ValueError("the runs by length are not the runs")
        if self._first != {first + length - 1: first for first, length in runs}:
            raise ValueError("the runs by last block are not the runs")
        if self._blocks != sum(length for _, length in runs):
            raise ValueError(f"{self._blocks} blocks are counted in {runs}")
        for (first, length), (following, _) in pairwise(runs):
            if first + length >= following:
                raise ValueError(f"the runs at {first} and {following} touch")

    def _cut(self, first: int, most: int) -> range:
        """Takes up to `most` blocks off the front of the run at `first`."""
        length = self._remove(first)
        if length > most:
            self._add(first + most, length - most)
        return range(first, first + min(length, most))

    def _join(self, run: range) -> None:
        first, stop = run.start, run.stop
        if not run:
            return
        if (before := self._first.get(first - 1)) is not None:
            self._remove(before)
            first = before
        if stop in self._length:
            stop += self._remove(stop)
        self._add(first, stop - first)

    def _add(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length - 1] = first
        insort(self._by_length, (length, first))
        self._blocks += length

    def _remove(self, first: int) -> int:
        length = self._length.pop(first)
        del self._first[first + length - 1]
        del self._by_length[bisect_left(self._by_length, (length, first))]
        self._blocks -= length
        return length
