"""Whether a process stays as it is: samples of what it holds, and what they may grow by. Pure but for `take`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One process after `transfers` transfers."""

    transfers: int
    descriptors: int
    sockets: int
    threads: int
    rss_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """What came on top, after the warm-up: counts at the end less those at its begin, memory by its slope."""

    descriptors: int
    sockets: int
    threads: int
    rss_bytes_per_transfer: float
    rss_bytes: int  # at the end

    def problems(self, rss_limit_bytes_per_transfer: float) -> list[str]:
        """What is not flat: counts may not grow at all, memory by no more than the limit."""
        counts = {"descriptors": self.descriptors, "sockets": self.sockets, "threads": self.threads}
        problems = [f"{count} {name} more" for name, count in counts.items() if count > 0]
        if self.rss_bytes_per_transfer > rss_limit_bytes_per_transfer:
            problems.append(f"{self.rss_bytes_per_transfer:.0f} B more for each transfer")
        return problems


def take(process: psutil.Process, transfers: int) -> Sample:
    """Looks at a process now."""
    return Sample(
        transfers=transfers,
        descriptors=process.num_fds(),
        sockets=len(process.net_connections(kind="all")),
        threads=process.num_threads(),
        rss_bytes=process.memory_info().rss,
    )


def growth(samples: Sequence[Sample], warm_up: float = 0.2) -> Growth:
    """Leaves the first `warm_up` of the samples out; compares medians of the first and the last quarter of the rest.

    The slope of memory is Theil and Sen's, the median of the slopes between all pairs: single peaks do not bend it.
    ValueError: fewer than 8 samples are left.
    """
    rest = samples[int(len(samples) * warm_up) :]
    if len(rest) < 8:
        raise ValueError(f"{len(samples)} samples are too few")
    slopes = [
        (later.rss_bytes - earlier.rss_bytes) / (later.transfers - earlier.transfers)
        for i, earlier in enumerate(rest)
        for later in rest[i + 1 :]
    ]
    first, last = rest[: len(rest) // 4], rest[-(len(rest) // 4) :]

    def more(of: Sequence[int], than: Sequence[int]) -> int:
        return int(statistics.median_low(of)) - int(statistics.median_high(than))

    return Growth(
        descriptors=more([s.descriptors for s in last], [s.descriptors for s in first]),
        sockets=more([s.sockets for s in last], [s.sockets for s in first]),
        threads=more([s.threads for s in last], [s.threads for s in first]),
        rss_bytes_per_transfer=statistics.median(slopes),
        rss_bytes=rest[-1].rss_bytes,
    )
