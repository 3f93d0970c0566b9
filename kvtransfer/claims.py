"""Which parts of one shard's KV were asked for, and by whom: what "a hand-off is used once" means for shards.

A receiver claims the area that its shard has in common with the sender's. Every (layer, head) is claimed `consumers`
times at most: once, unless several receivers hold the same heads. The same receiver shard never claims twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtransfer.errors import TransferUsed
from kvtransfer.layout import Area


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One receiver shard's part. `receiver` is its incarnation."""

    receiver: str
    area: Area


class Claims:
    """All claims on one offer of `shard`."""

    def __init__(self, shard: Area, consumers: int = 1) -> None:
        if consumers < 1:
            raise ValueError(f"consumers must be at least 1, not {consumers}")
        self._shard: Final = shard
        self._consumers: Final = consumers
        self._times = np.zeros((shard.layers, shard.heads), np.int32)
        self._made: set[Claim] = set()
        self._unused = shard.layers * shard.heads * consumers

    @property
    def complete(self) -> bool:
        """Everything was acknowledged by everybody who is to have it."""
        return self._unused == 0

    @property
    def made(self) -> bool:
        """Somebody has claimed every part that there is."""
        return bool((self._times == self._consumers).all())

    def make(self, claim: Claim) -> None:
        """Notes a claim within the shard. TransferUsed: it was made before, or `consumers` others have a part of it."""
        if claim in self._made:
            raise TransferUsed(f"{claim.area} was pulled by {claim.receiver} before")
        if (self._part(claim.area) >= self._consumers).any():
            raise TransferUsed(f"of {claim.area} something was pulled {self._consumers} times before")
        self._made.add(claim)
        self._part(claim.area)[...] += 1

    def acknowledge(self, claim: Claim) -> None:
        """The claim's KV is in place at its receiver. Once for each claim that was made."""
        self._unused -= claim.area.layers * claim.area.heads

    def _part(self, area: Area) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        layer, head = self._shard.layer_begin, self._shard.head_begin
        return self._times[
            area.layer_begin - layer : area.layer_end - layer, area.head_begin - head : area.head_end - head
        ]
