"""The step thread: commands in order, one wake-up per step, asleep without work, loud when the core breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from kvtransfer.blocks import BlockCounts
from services.engine.plan import Slice
from services.engine.sampling import SamplingSpec
from services.errors import DiptychError
from services.worker.step_thread import StepThread
from services.worker.work import Computed, Load, Work


class CountingCore:
    """Runs each submitted number of steps; an event per step and per failure."""

    def __init__(self) -> None:
        self.left = 0
        self.events: list[str] = []
        self.threads: set[int] = set()

    def apply(self, command: int, now_s: float) -> None:
        if command < 0:
            raise RuntimeError("a defect in the core")
        self.left += command
        self.events.append(f"took {command}")

    def plan(self, now_s: float) -> Sequence[Work]:
        self.threads.add(threading.get_ident())
        item = Slice(token_ids=(1,), start=0, blocks=(0,), wants_logits=True)
        return [Work(key=str(self.left), slice=item, sampling=SamplingSpec())] if self.left else []

    def complete(self, work: Sequence[Work], results: Sequence[Computed], now_s: float) -> None:
        self.left -= 1
        self.events += [f"token {result.token_id}" for result in results]

    def fail(self, work: Sequence[Work], error: Exception) -> None:
        self.left = 0
        self.events.append(f"failed: {error}")

    def take_events(self) -> list[str]:
        events, self.events = self.events, []
        return events

    def load(self) -> Load:
        counts = BlockCounts(total=0, free=0, held=0, leased=0)
        return Load(blocks=counts, queued_tokens=self.left, running=0, waiting=0)

    def check(self) -> None:
        pass


class Listener:
    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.crashes: list[BaseException] = []
        self._news = asyncio.Event()

    def deliver(self, events: list[str]) -> None:
        self.batches.append(events)
        self._news.set()

    def crash(self, error: BaseException) -> None:
        self.crashes.append(error)
        self._news.set()

    async def until(self, last: str) -> list[str]:
        async with asyncio.timeout(5):
            while True:
                flat = [event for batch in self.batches for event in batch]
                if last in flat or self.crashes:
                    return flat
                self._news.clear()
                await self._news.wait()


async def test_steps_run_on_one_thread_and_each_wakes_the_loop_once_and_news_of_before_do_not_wait_for_it() -> None:
    core, listener = CountingCore(), Listener()
    numbers = iter(range(100))
    thread = StepThread(
        core, lambda work: [Computed(token_id=next(numbers))], deliver=listener.deliver, on_crash=listener.crash
    )
    thread.submit(3)
    thread.start()
    assert await listener.until("token 2") == ["took 3", "token 0", "token 1", "token 2"]
    assert listener.batches == [["took 3"], ["token 0"], ["token 1"], ["token 2"]]
    thread.submit(1)
    assert (await listener.until("token 3"))[-2:] == ["took 1", "token 3"]
    await thread.stop(5)
    assert len(core.threads) == 1 and threading.get_ident() not in core.threads
    assert thread.load.queued_tokens == 0


async def test_each_computed_step_is_measured_and_a_failed_one_is_not() -> None:
    core, listener = CountingCore(), Listener()
    outcomes: list[int | None] = [4, None, 5]
    measured: list[tuple[str, float]] = []

    def execute(work: Sequence[Work]) -> list[Computed]:
        if (outcome := outcomes.pop(0)) is None:
            raise ValueError("no such kernel")
        return [Computed(token_id=outcome)]

    thread = StepThread(
        core,
        execute,
        deliver=listener.deliver,
        on_crash=listener.crash,
        measured=lambda work, duration_s: measured.append((work[0].key, duration_s)),
    )
    thread.start()
    thread.submit(2)
    assert "failed: no such kernel" in await listener.until("failed: no such kernel")
    thread.submit(1)
    await listener.until("token 5")
    await thread.stop(5)
    assert [key for key, _ in measured] == ["2", "1"]
    assert all(0 <= duration_s < 5 for _, duration_s in measured)


async def test_a_step_that_cannot_be_computed_fails_its_work_and_the_thread_goes_on() -> None:
    core, listener = CountingCore(), Listener()
    broken = True

    def execute(work: Sequence[Work]) -> list[Computed]:
        if broken:
            raise ValueError("no such kernel")
        return [Computed(token_id=9)]

    thread = StepThread(core, execute, deliver=listener.deliver, on_crash=listener.crash)
    thread.start()
    thread.submit(2)
    assert "failed: no such kernel" in await listener.until("failed: no such kernel")
    broken = False
    thread.submit(1)
    assert "token 9" in await listener.until("token 9")
    await thread.stop(5)
    assert listener.crashes == []


async def test_the_part_of_a_step_that_failed_is_failed_and_the_rest_completed() -> None:
    core, listener = CountingCore(), Listener()
    results: list[Computed | DiptychError] = [DiptychError("broken logits")]
    thread = StepThread(core, lambda work: results, deliver=listener.deliver, on_crash=listener.crash)
    thread.start()
    thread.submit(1)
    assert await listener.until("failed: broken logits") == ["took 1", "failed: broken logits"]
    results[0] = Computed(token_id=5)
    thread.submit(1)
    assert (await listener.until("token 5"))[-2:] == ["took 1", "token 5"]
    await thread.stop(5)
    assert listener.crashes == []


async def test_a_defect_of_the_core_is_reported_instead_of_served() -> None:
    listener = Listener()
    thread = StepThread(
        CountingCore(), lambda work: [Computed(token_id=0)], deliver=listener.deliver, on_crash=listener.crash
    )
    thread.start()
    thread.submit(-1)
    await listener.until("never")
    assert [str(error) for error in listener.crashes] == ["a defect in the core"]
    await thread.stop(5)


async def test_an_unusable_core_number_is_a_crash_and_not_a_silent_thread() -> None:
    listener = Listener()
    thread = StepThread(
        CountingCore(),
        lambda work: [Computed(token_id=0)],
        deliver=listener.deliver,
        on_crash=listener.crash,
        cores=[1_000],
    )
    thread.start()
    await listener.until("never")
    assert isinstance(listener.crashes[0], OSError)
    await thread.stop(5)


@pytest.mark.parametrize("nice", [0, 10])
async def test_the_thread_takes_its_place(nice: int) -> None:
    import os

    places: list[tuple[set[int], int]] = []

    def execute(work: Sequence[Work]) -> list[Computed]:
        places.append((os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        return [Computed(token_id=0)]

    core, listener = CountingCore(), Listener()
    first = min(os.sched_getaffinity(0))
    thread = StepThread(core, execute, deliver=listener.deliver, on_crash=listener.crash, cores=[first], nice=nice)
    thread.submit(1)
    thread.start()
    await listener.until("token 0")
    await thread.stop(5)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert places == [({first}, max(before, nice))]
