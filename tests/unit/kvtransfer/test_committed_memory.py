"""Memory that is committed before it is used."""

from __future__ import annotations

import mmap
import resource

import numpy as np
import numpy.typing as npt
import pytest

from kvtransfer import Arena, KvLayout, huge_pages

Bytes = npt.NDArray[np.generic]
PAGE_BYTES = resource.getpagesize()
POPULATE_WRITE = 23


def faults_of_writing(memory: Bytes) -> int:
    """Page faults that one write to every page of the memory takes."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory.reshape(-1).view(np.uint8)[::PAGE_BYTES] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.fixture
def committed() -> Bytes:
    """What `zeros` gave, committed; skips where the system cannot do that."""
    try:
        mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).madvise(POPULATE_WRITE)
    except OSError:
        pytest.skip("this system cannot commit memory ahead: Linux can since 5.14")
    memory = huge_pages.zeros(5 * huge_pages.HUGE_PAGE_BYTES + 1)
    assert huge_pages.populate(memory)
    return memory


def test_nobody_waits_for_a_page_that_was_committed(committed: Bytes) -> None:
    assert faults_of_writing(huge_pages.zeros(committed.size)) > 0, "without it somebody does"
    assert faults_of_writing(committed) == 0
    assert committed.sum() == -(-committed.size // PAGE_BYTES), "and it was zero before"


@pytest.mark.parametrize("written", [0, huge_pages.HUGE_PAGE_BYTES, 3 * huge_pages.HUGE_PAGE_BYTES - 1])
def test_what_was_written_before_stays(committed: Bytes, written: int) -> None:
    memory = huge_pages.zeros(3 * huge_pages.HUGE_PAGE_BYTES)
    memory[written % memory.size] = 42
    assert huge_pages.populate(memory)
    assert memory[written % memory.size] == 42
    assert memory.sum() == 42


def test_memory_of_no_bytes_is_committed() -> None:
    assert huge_pages.populate(np.empty(0, np.uint8))


def test_what_cannot_be_committed_is_said() -> None:
    """A mapping that may only be read."""
    read_only = np.frombuffer(mmap.mmap(-1, PAGE_BYTES, prot=mmap.PROT_READ), np.uint8)
    assert not huge_pages.populate(read_only)


def test_an_arena_is_committed_whole(committed: Bytes) -> None:
    layout = KvLayout(model="m", dtype="bf16", layers=4, kv_heads=3, head_dim=64, block_tokens=16)
    arena = Arena(layout, blocks=200)
    assert arena.populate()
    assert faults_of_writing(arena.array) == 0
