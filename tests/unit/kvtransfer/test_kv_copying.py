"""Copies on a thread of their own: what comes of them, and that a cancelled one is waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvtransfer.copying import CopyThread

LIMIT_S = 5.0


@pytest.fixture
def thread() -> Iterator[CopyThread]:
    thread = CopyThread("copies")
    yield thread
    thread.close()


async def test_a_copy_runs_on_the_thread_and_returns_what_it_found(thread: CopyThread):
    names = [await thread.run(lambda: threading.current_thread().name) for _ in range(2)]
    assert names[0] == names[1] != threading.current_thread().name


async def test_a_copy_that_fails_fails_its_caller_and_not_the_next(thread: CopyThread):
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    assert await thread.run(lambda: 7) == 7


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_cancelled_caller_gets_its_memory_back_only_when_the_copy_has_ended(thread: CopyThread, cancels: int):
    """The copy is held in its middle meanwhile: were it not waited for, the caller would end then."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)
        ended.set()

    caller = asyncio.ensure_future(thread.run(copy))
    await asyncio.to_thread(begun.wait, LIMIT_S)
    for _ in range(cancels):
        caller.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not caller.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(caller, LIMIT_S)
    assert ended.is_set()


async def test_a_copy_that_was_never_begun_is_waited_for_too(thread: CopyThread):
    go_on, ended = threading.Event(), threading.Event()
    first = asyncio.ensure_future(thread.run(lambda: go_on.wait(LIMIT_S)))
    second = asyncio.ensure_future(thread.run(ended.set))
    await asyncio.sleep(0)
    second.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()
    go_on.set()
    assert await first
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(second, LIMIT_S)
    assert ended.is_set()
