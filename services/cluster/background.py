"""Loops that run for as long as their owner: started, stopped, and loud when they die of a defect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable

log = logging.getLogger(__name__)


def start_loop(loop: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    """Runs a loop that handles its expected errors itself; any other ends it and is logged with its traceback."""
    task = asyncio.create_task(loop, name=name)
    task.add_done_callback(_report)
    return task


async def stop_loops(loops: Iterable[asyncio.Task[None]]) -> None:
    """Cancels loops and waits until they have ended."""
    tasks = list(loops)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s has ended: %s", task.get_name(), error, exc_info=error)
