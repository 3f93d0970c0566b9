"""The time that bytes take on a link of a given rate. Pure: the caller brings the time."""

from __future__ import annotations

from typing import Final

LATENESS_S: Final = 0.005
"""Who asks again within this of the end of what he booked before was held up by a timer, and loses no link time by
it. Without it a sender of one message at a time would get 24 ms of every 25 at 1 Gb/s.
"""


class TokenBucket:
    """A link of `bytes_per_s`, used by one message after the other. Nothing leaves ahead of its time: there are no
    bursts.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"bytes_per_s must be positive, is {bytes_per_s}")
        self.bytes_per_s: Final = bytes_per_s
        self._end_s = float("-inf")

    def reserve(self, count: int, now_s: float) -> float:
        """Books the link for `count` bytes, after all that was booked before; returns the time at which the last of
        them is through.
        """
        begin_s = self._end_s if now_s - self._end_s < LATENESS_S else now_s
        self._end_s = begin_s + count / self.bytes_per_s
        return self._end_s
