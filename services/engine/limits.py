"""What this machine can do at best, measured on the spot: the floors that an engine is compared with."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

from kvtransfer import huge_pages

_STREAM_BYTES = 256 << 20  # far beyond any cache
_GEMM_SHAPES = ((256, 576, 1536), (1024, 1024, 1024))
_REPEATS = 7


def read_bytes_per_s(device: str) -> float:
    """How fast one thread, or the GPU, reads memory that is in no cache: the best of some ways to read."""
    if device == "cpu":
        memory = torch.from_numpy(huge_pages.zeros(_STREAM_BYTES)).view(torch.float32).fill_(1)
    else:
        memory = torch.ones(_STREAM_BYTES // 4, device=device)
    halves = memory.view(2, -1)
    words = memory.view(torch.int32)
    ways: list[Callable[[], torch.Tensor]] = [
        memory.sum,
        lambda: torch.dot(halves[0], halves[1]),
        words.max,
    ]
    if device == "cpu":
        compare = ctypes.CDLL(None).memcmp
        compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        begin, half = memory.data_ptr(), _STREAM_BYTES // 2
        ways.append(lambda: torch.tensor([compare(begin, begin + half, half)]))  # equal halves: reads all of both
    return _STREAM_BYTES / min(_fastest_s(way) for way in ways)


def gemm_flops_per_s(device: str) -> float:
    """How many floating point operations one thread, or the GPU, does a second in a matrix product: the best of float32
    and bfloat16.
    """
    best = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        for m, k, n in _GEMM_SHAPES:
            a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
            best = max(best, 2 * m * k * n / _fastest_s(lambda a=a, b=b: torch.mm(a, b.t())))  # type: ignore[misc]
    return best


def _fastest_s(work: Callable[[], torch.Tensor]) -> float:
    torch.set_num_threads(1)
    times = []
    for _ in range(_REPEATS):
        begin_s = time.perf_counter()
        work().flatten()[0].item()  # waits for a GPU
        times.append(time.perf_counter() - begin_s)
    return min(times[1:])
