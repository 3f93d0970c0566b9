"""What this machine can do at best, measured on the spot: the floors that an engine is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

_STREAM_BYTES = 256 << 20  # far beyond any cache
_GEMM_SHAPES = ((256, 576, 1536), (1024, 1024, 1024))
_REPEATS = 7


def read_bytes_per_s() -> float:
    """How fast one thread reads memory that is in no cache: the best of several ways to read."""
    memory = torch.from_numpy(np.ones(_STREAM_BYTES // 4, np.float32))
    half = len(memory) // 2
    array = memory.numpy().view(np.uint8)
    ways: tuple[Callable[[], object], ...] = (
        memory.sum,
        lambda: torch.dot(memory[:half], memory[half:]),
        array.max,
    )
    return _STREAM_BYTES / min(_fastest_s(way) for way in ways)


def gemm_flops_per_s() -> float:
    """How many floating point operations one thread does in a matrix product: the best of float32 and bfloat16."""
    best = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        for m, k, n in _GEMM_SHAPES:
            a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            best = max(best, 2 * m * k * n / _median_s(lambda a=a, b=b: torch.mm(a, b.t())))  # type: ignore[misc]
    return best


def _median_s(work: Callable[[], object]) -> float:
    return median(_times_s(work))


def _fastest_s(work: Callable[[], object]) -> float:
    return min(_times_s(work))


def _times_s(work: Callable[[], object]) -> list[float]:
    torch.set_num_threads(1)
    work()
    times = []
    for _ in range(_REPEATS):
        begin_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin_s)
    return times
