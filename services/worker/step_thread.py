"""The step thread: the one thread that owns a worker's core, model and block tables.

asyncio submits commands and gets events back, one wake-up per step, and one before it when there is news already. The
thread sleeps while there is nothing to run.
On a CPU it is pinned to its own cores, and a prefill thread runs at a lower priority.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from services.errors import DiptychError
from services.worker.work import Computed, Execute, Load, StepCore, Work

log = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


class StepThread(Generic[CommandT, EventT]):
    """Runs `core` with `execute` until `stop`. `deliver` is called on the event loop with each step's events.

    `measured` is called on the step thread with each computed step and the seconds that it took, planned and computed.
    An exception out of the core itself (not out of a computation) is a defect: `on_crash` is called on the loop, so
    that the process can end instead of serving with a wrong state.
    """

    def __init__(
        self,
        core: StepCore[CommandT, EventT],
        execute: Execute,
        *,
        deliver: Callable[[list[EventT]], None],
        on_crash: Callable[[BaseException], None],
        measured: Callable[[Sequence[Work], float], None] = lambda work, duration_s: None,
        cores: Sequence[int] = (),
        nice: int = 0,
    ) -> None:
        self._core, self._execute = core, execute
        self._deliver, self._on_crash, self._measured = deliver, on_crash, measured
        self._cores, self._nice = tuple(cores), nice
        self._commands: queue.SimpleQueue[CommandT | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._load = core.load()
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, command: CommandT) -> None:
        """Hands a command over; it is applied before the next step."""
        self._commands.put(command)

    @property
    def load(self) -> Load:
        """The core's numbers after its last step."""
        return self._load

    async def stop(self, limit_s: float) -> None:
        """Ends the thread after its current step; gives up waiting after `limit_s` (the thread is a daemon)."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, limit_s)

    def _run(self) -> None:
        try:
            self._take_place()
            idle = True
            while self._take_commands(wait=idle):
                idle = not self._step()
        except Exception as error:
            log.critical("the step thread died: %s", error, exc_info=error)
            self._call(self._on_crash, error)

    def _take_place(self) -> None:
        thread_id = threading.get_native_id()
        if self._cores:
            os.sched_setaffinity(thread_id, self._cores)
        if self._nice:
            os.setpriority(os.PRIO_PROCESS, thread_id, self._nice)

    def _take_commands(self, *, wait: bool) -> bool:
        """Applies what is queued; waits for a first command when `wait`. False when the thread is to end."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._core.apply(command, time.monotonic())
            wait = False

    def _step(self) -> bool:
        """One step. False when nothing was runnable."""
        begin_s = time.monotonic()
        work = self._core.plan(begin_s)
        if work:
            self._deliver_events()  # what does not depend on the step does not wait for it
            try:
                results = self._execute(work)
            except Exception as error:
                log.error("a step of %d requests failed: %s", len(work), error, exc_info=error)
                self._core.fail(work, error)
            else:
                end_s = time.monotonic()
                if self._complete(work, results, end_s):
                    self._measured(work, end_s - begin_s)
        self._load = self._core.load()
        self._deliver_events()
        return bool(work)

    def _deliver_events(self) -> None:
        if events := self._core.take_events():
            self._call(self._deliver, events)

    def _complete(self, work: Sequence[Work], results: Sequence[Computed | DiptychError], now_s: float) -> bool:
        """Gives the core a computed step: first what failed of it, then the rest. Says whether nothing failed."""
        good: list[Work] = []
        computed: list[Computed] = []
        for item, result in zip(work, results, strict=True):
            if isinstance(result, DiptychError):
                log.error("one of the %d requests of a step failed: %s", len(work), result)
                self._core.fail([item], result)
            else:
                good.append(item)
                computed.append(result)
        if good:
            self._core.complete(good, computed, now_s)
        return len(good) == len(work)

    def _call(self, function: Callable[[EventT2], None], argument: EventT2) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop is closed: the process is ending
            log.debug("dropped events after the event loop closed")


EventT2 = TypeVar("EventT2")
