"""What is said after a request's end: to the scheduler that it is over, to a prefill worker that its KV is not wanted.

The client does not wait for it, and a cancelled request still says it; each word has a short deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from services.errors import DiptychError
from services.gateway.peers import SchedulerClient, WorkerClient
from services.gateway.placement import Placement

log = logging.getLogger(__name__)

WORD_LIMIT_S = 2.0


class Closing:
    """Owns the tasks of last words; `aclose` waits for them."""

    def __init__(self, scheduler: SchedulerClient, workers: WorkerClient) -> None:
        self._scheduler, self._workers = scheduler, workers
        self._tasks: set[asyncio.Task[None]] = set()

    def finish(self, request_id: str) -> None:
        """Tells the scheduler that the request is over."""
        self._say(self._scheduler.finish(request_id, WORD_LIMIT_S))

    def release(self, placement: Placement) -> None:
        """Tells the prefill worker that nobody comes for the hand-off. One that is being pulled is not affected."""
        self._say(self._workers.release(placement, WORD_LIMIT_S))

    async def aclose(self) -> None:
        """Waits until everything was said; at most `WORD_LIMIT_S`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=WORD_LIMIT_S)
        for task in self._tasks:
            task.cancel()

    def _say(self, word: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(_said(word))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _said(word: Coroutine[None, None, None]) -> None:
    try:
        await word
    except DiptychError as error:
        log.info("last words of a request were not heard: %s", error)
