"""Who lives. Workers register and heartbeat; schedulers watch, and decode workers, for prefill workers to meet.

Life of a registration: register (an older incarnation at the same address is replaced) → heartbeat every HEARTBEAT_S
with fresh numbers, at once on a change of state → deregister. A worker that dies is gone TTL_S after its last
heartbeat. A heartbeat that finds nothing (Redis was emptied, or away for longer than TTL_S) registers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.cluster import keys
from services.cluster.background import start_loop, stop_loops
from services.cluster.record import BlockCounts, Link, Role, State, WorkerRecord, from_json
from services.cluster.store import Store, StoreUnavailable, strings

__all__ = ["BlockCounts", "Link", "LiveWorker", "MembershipView", "Registration", "Role", "State", "WorkerRecord"]

HEARTBEAT_S = 1.0
REFRESH_S = 1.0
TTL_S = 3.0
_INDEX_TTL_S = 60.0
_RESUBSCRIBE_S = 0.5
_LEAVE_LIMIT_S = 1.0

log = logging.getLogger(__name__)


class Registration:
    """Keeps one worker known. `record_source` is asked for the current record before every heartbeat.

    Survives Redis being away: keeps trying, and says so once per outage.
    """

    def __init__(self, store: Store, record_source: Callable[[], WorkerRecord]) -> None:
        self._store = store
        self._source = record_source
        self._sending = asyncio.Lock()  # heartbeats must not overtake each other
        self._registered = False
        self._replaced = False
        self._away = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Registers, and keeps the registration until `aclose`. Does not fail when Redis is away."""
        await self.announce()
        self._task = start_loop(self._beat(), "heartbeat")

    async def announce(self) -> None:
        """Sends the current record at once and wakes every view. A Redis that is away hears it when it is back."""
        await self._send(tell=True)

    async def aclose(self) -> None:
        """Stops the heartbeat and deregisters; when Redis is away the record expires by itself."""
        if self._task is not None:
            await stop_loops([self._task])
        record = self._source()
        record_keys = [keys.WORKERS, keys.worker(record.incarnation)]
        with contextlib.suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(_LEAVE_LIMIT_S):
                await self._store.run(
                    "deregister", record_keys, [record.address, record.incarnation, keys.WORKERS_CHANGED]
                )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._send(tell=False)

    async def _send(self, *, tell: bool) -> None:
        async with self._sending:
            try:
                await self._register_or_beat(self._source(), tell=tell or self._away)
            except StoreUnavailable as error:
                if not self._away:
                    log.warning("heartbeat: %s; trying on", error)
                self._away = True
                return
            if self._away:
                log.warning("heartbeat: Redis is back")
            self._away = False

    async def _register_or_beat(self, record: WorkerRecord, *, tell: bool) -> None:
        record_keys = [keys.WORKERS, keys.worker(record.incarnation)]
        arguments: list[str | int] = [
            *(record.address, record.incarnation, record.to_json()),
            *(int(TTL_S * 1000), int(_INDEX_TTL_S * 1000), keys.WORKER_PREFIX),
        ]
        if self._registered:
            channel = keys.WORKERS_CHANGED if tell else ""
            answer = await self._store.run("heartbeat", record_keys, [*arguments, channel])
            if answer == "replaced" and not self._replaced:
                log.error("another worker has registered as %s; not registering over it", record.address)
            self._replaced = answer == "replaced"
            if answer != "missing":
                return
            log.warning("heartbeat: Redis does not know %s; registering again", record.name)
        replaced = await self._store.run("register", record_keys, [*arguments, keys.WORKERS_CHANGED])
        if replaced:
            log.info("replaced incarnation %s at %s", replaced, record.address)
        self._registered = True


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveWorker:
    """A worker in a view, and how old the news of it is."""

    record: WorkerRecord
    heartbeat_age_s: float


class MembershipView:
    """The live workers, kept current by a full refresh every `refresh_s` and at once when a change is announced.

    While Redis is away the last known view stands; the subscription comes back by itself.
    """

    def __init__(
        self, store: Store, clock: Callable[[], float] = time.monotonic, *, refresh_s: float = REFRESH_S
    ) -> None:
        """`clock`: monotonic seconds."""
        self._store = store
        self._refresh_s = refresh_s
        self._clock = clock
        self._seen: tuple[LiveWorker, ...] = ()
        self._seen_at_s = 0.0
        self._connected = False
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._first = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> bool:
        """Whether the last refresh reached Redis."""
        return self._connected

    async def start(self) -> None:
        """Begins to watch, until `aclose`."""
        self._tasks = [
            start_loop(self._refresh(), "membership refresh"),
            start_loop(self._subscribe(), "membership subscription"),
        ]

    async def synced(self) -> None:
        """Waits until Redis has answered once. The caller sets the deadline."""
        await self._first.wait()

    async def aclose(self) -> None:
        """Stops watching; the view stays as it is."""
        await stop_loops(self._tasks)

    def workers(self) -> Sequence[LiveWorker]:
        """Live workers by role and name, with the age of their news now."""
        since_s = self._clock() - self._seen_at_s
        return [
            LiveWorker(record=worker.record, heartbeat_age_s=worker.heartbeat_age_s + since_s) for worker in self._seen
        ]

    async def changed(self, timeout_s: float) -> bool:
        """Waits until a worker comes, goes, or changes state or numbers; False when `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _refresh(self) -> None:
        while True:
            self._wake.clear()
            await self._refresh_once()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s):
                    await self._wake.wait()

    async def _refresh_once(self) -> None:
        try:
            reply = strings(
                await self._store.run("list_workers", [keys.WORKERS], [keys.WORKER_PREFIX, int(TTL_S * 1000)])
            )
        except StoreUnavailable as error:
            if self._connected:
                log.error("%s; keeping the last known view of %d workers", error, len(self._seen))
            self._connected = False
            return
        if not self._connected:
            log.info("watching workers in Redis at %s", self._store.url)
        self._connected = True
        self._replace(sorted(_parse(reply), key=lambda worker: (worker.record.role, worker.record.name)))
        self._first.set()

    def _replace(self, workers: Sequence[LiveWorker]) -> None:
        differs = [worker.record for worker in workers] != [worker.record for worker in self._seen]
        self._seen, self._seen_at_s = tuple(workers), self._clock()
        if differs:
            self._changed.set()
            self._changed = asyncio.Event()

    async def _subscribe(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):  # _refresh says so
                async for _ in self._store.listen(keys.WORKERS_CHANGED):
                    self._wake.set()
            await asyncio.sleep(_RESUBSCRIBE_S)


def _parse(reply: Sequence[str]) -> list[LiveWorker]:
    workers = []
    for text, age_ms in zip(reply[::2], reply[1::2], strict=True):
        try:
            record = from_json(text)
        except ValueError as error:
            log.warning("passing over a worker record of another version: %s", error)
            continue
        workers.append(LiveWorker(record=record, heartbeat_age_s=int(age_ms) / 1000))
    return workers
