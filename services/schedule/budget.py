"""What swapping may use: measured bandwidth, a bound on how much it delays steps, blocks kept free for bursts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MOST_DELAY: Final = 0.05
"""Share of a step by which swapping may delay it."""
MEMORY: Final = 16.0
"""About how many measurements make up a mean."""
DECAY: Final = 0.99
"""Of the remembered largest burst, a step: half of it is forgotten after 69 steps."""
MOST_RESERVE: Final = 8
"""The reserve is at most this part of the pool."""


@dataclass(kw_only=True)
class Bandwidth:
    """Bytes that may be copied beside one step, so that they are done with it and delay it by MOST_DELAY at most.

    Both are measured online: how fast copies are, and by how much a step with copies is longer than predicted without.
    """

    bytes_per_s: float  # a first guess
    delay_s_per_byte: float = 0.0
    _delays: int = field(default=0, init=False)

    def copied(self, copied_bytes: int, seconds: float) -> None:
        """One copy and how long it took."""
        if copied_bytes > 0 and seconds > 0:
            self.bytes_per_s += (copied_bytes / seconds - self.bytes_per_s) / MEMORY

    def delayed(self, copied_bytes: float, delay_s: float) -> None:
        """One step beside which so much was copied took so much longer than predicted; less than 0 counts as well."""
        if copied_bytes > 0:
            self._delays += 1
            self.delay_s_per_byte += (delay_s / copied_bytes - self.delay_s_per_byte) / min(MEMORY, self._delays)

    def allowed_bytes(self, step_s: float) -> float:
        """Beside a step that takes so long by itself."""
        possible = self.bytes_per_s * step_s
        if self.delay_s_per_byte <= 0:
            return possible
        return min(possible, MOST_DELAY * step_s / self.delay_s_per_byte)


@dataclass(kw_only=True)
class Reserve:
    """Blocks kept free for bursts, from history: the most that steps asked for, forgotten slowly."""

    total_blocks: int
    _burst: float = field(default=0.0, init=False)

    def asked(self, blocks: int) -> None:
        """A step needed so many more blocks than the one before."""
        self._burst = max(float(blocks), self._burst * DECAY)

    @property
    def blocks(self) -> int:
        """How many."""
        return min(round(self._burst), self.total_blocks // MOST_RESERVE)
