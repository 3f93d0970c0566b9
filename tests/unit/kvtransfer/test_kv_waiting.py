"""Waits that end when something is wrong."""

from __future__ import annotations

import asyncio

import pytest

from kvtransfer import PeerLost
from kvtransfer.waiting import while_well


class Watch:
    """What is wrong, and a wait that looks for it first."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.error: PeerLost | None = None
        self.undone: list[str] = []

    async def until(self, ready) -> None:
        while True:
            if self.error:
                raise self.error
            if ready():
                return
            self.changed.clear()
            await self.changed.wait()

    def fail(self) -> None:
        self.error = PeerLost("gone")
        self.changed.set()

    async def wait(self, work) -> str:
        return await while_well(work, self.until, self.changed, undo=self.undone.append)


async def result_of(future: asyncio.Future[str]) -> str:
    return await future


async def test_what_comes_is_returned():
    watch, future = Watch(), asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(watch.wait(result_of(future)))
    await asyncio.sleep(0)
    future.set_result("it")
    assert await waiting == "it"
    assert watch.undone == []


async def test_what_it_fails_with_is_raised():
    watch, future = Watch(), asyncio.get_running_loop().create_future()
    future.set_exception(KeyError("no"))
    with pytest.raises(KeyError):
        await watch.wait(result_of(future))


async def test_what_does_not_come_is_cancelled_when_something_is_wrong():
    watch, future = Watch(), asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(watch.wait(result_of(future)))
    await asyncio.sleep(0)
    watch.fail()
    with pytest.raises(PeerLost):
        await waiting
    assert future.cancelled()
    assert watch.undone == []


async def test_what_comes_at_the_moment_of_the_failure_is_undone():
    """A staging buffer that was handed out just then would be lost for good."""
    watch, future = Watch(), asyncio.get_running_loop().create_future()

    async def work() -> str:
        result = await future
        watch.fail()
        return result

    waiting = asyncio.ensure_future(watch.wait(work()))
    await asyncio.sleep(0)
    future.set_result("it")
    with pytest.raises(PeerLost):
        await waiting
    assert watch.undone == ["it"]
