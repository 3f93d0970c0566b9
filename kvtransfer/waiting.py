"""Waiting for something that may never come, no longer than all is well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")


async def while_well(
    work: Coroutine[None, None, T],
    until: Callable[[Callable[[], bool]], Awaitable[None]],
    changed: asyncio.Event,
    *,
    undo: Callable[[T], object] = lambda _: None,
) -> T:
    """Awaits `work`, which must be safe to cancel, and returns its result.

    `until(ready)` waits for `ready` to hold, asks again whenever `changed` is set, and raises what is wrong. When it
    raises, `work` is cancelled; a result that came all the same goes to `undo`.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda _: changed.set())
    try:
        await until(task.done)
    except BaseException:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            undo(task.result())
        raise
    return task.result()
