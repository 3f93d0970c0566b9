"""Who is where, as the swapper looks at it: counted when it asks, so that a step costs the same however many live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Final

from kvtransfer.blocks import BlockPool
from services.decode.requests import RESIDENT, Request, Requests
from services.engine.sequence import blocks_needed

MOST_VICTIMS: Final = 96
"""Requests of a stage that one step looks at as victims: it costs the same however many are here."""


class Resident(Mapping[str, int]):
    """Blocks that come free when a resident request leaves, counted when somebody asks: what others share stays.

    Its keys are those that may leave; those that are pinned are here, too. Of very many it names some: those that came
    first, who have had their turn, and those that came last, whose turn is far off.
    """

    def __init__(self, requests: Requests, pool: BlockPool) -> None:
        self._stages: list[dict[str, Request]] = [requests.within(stage) for stage in RESIDENT]
        self._pinned = requests.pinned
        self._exclusive: Callable[[str], int] = pool.exclusive

    def __getitem__(self, key: str) -> int:
        if key not in self:
            raise KeyError(key)
        return self._exclusive(key)

    def __contains__(self, key: object) -> bool:
        running, computing = self._stages
        return key in running or key in computing

    def __iter__(self) -> Iterator[str]:
        for stage in self._stages:
            if len(stage) <= MOST_VICTIMS:
                named: Iterable[str] = stage
            else:
                named = chain(islice(stage, MOST_VICTIMS // 2), islice(reversed(stage), MOST_VICTIMS // 2))
            yield from (key for key in named if key not in self._pinned)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OnHost(Mapping[str, int]):
    """Blocks of those that are swapped, counted when somebody asks."""

    def __init__(self, away: Mapping[str, Request], block_tokens: int) -> None:
        self._away, self._block_tokens = away, block_tokens

    def __getitem__(self, key: str) -> int:
        return blocks_needed(self._away[key].saved_tokens, self._block_tokens)

    def __contains__(self, key: object) -> bool:
        return key in self._away

    def __iter__(self) -> Iterator[str]:
        return iter(self._away)

    def __len__(self) -> int:
        return len(self._away)
