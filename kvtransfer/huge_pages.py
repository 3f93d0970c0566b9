"""Host memory in pages of its own: huge ones, as far as the system has them, are a third faster to read, and miss less
when scattered.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES: Final = 2 << 20


def zeros(count: int) -> npt.NDArray[np.uint8]:
    """`count` zero bytes that begin at a huge page. The system commits them when they are first written."""
    # Private and anonymous; it lives as long as a view of it.
    memory = mmap.mmap(-1, count + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    begin = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[begin : begin + count]


def page_aligned(count: int) -> npt.NDArray[np.uint8]:
    """`count` bytes that begin at a page of the usual size, for what would not fill a huge one."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, max(1, count), flags=flags), np.uint8)[:count]
