"""Host memory in pages of its own: huge ones, as far as the system has them, are a third faster to read, and miss less
when scattered.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES: Final = 2 << 20

_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; mmap has no name for it yet."""


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


def populate(memory: npt.NDArray[np.generic]) -> bool:
    """Has the system commit all pages of memory that `zeros` gave, and keeps what is in them: others may write to it
    meanwhile.

    Clearing a huge page takes milliseconds, which otherwise whoever writes to it first has to wait. Runs without the
    GIL. False: the system cannot, or has not so much memory.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return not memory.nbytes or not advise(memory.ctypes.data, memory.nbytes, _MADV_POPULATE_WRITE)


def page_aligned(count: int) -> npt.NDArray[np.uint8]:
    """`count` bytes that begin at a page of the usual size, for what would not fill a huge one."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, max(1, count), flags=flags), np.uint8)[:count]
