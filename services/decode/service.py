"""The shell around the decode core: asyncio on one side, the step thread and the receiver on the other.

Each request is a stream of events for its `Decode` call. Until the core has reserved blocks, a task renews the hand-off
at the sender; then another one pulls the KV into them and reports back. That one outlives the call if the call goes
away, until nothing writes to the blocks any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer import Received as Arrived
from services.decode.copier import Copier
from services.decode.hand_off import HandOff, Puller
from services.decode.messages import (
    Began,
    Cancel,
    Command,
    Copy,
    Drained,
    Event,
    Failed,
    Finished,
    Received,
    Reserved,
    Submit,
    Tokens,
    TransferFailed,
)
from services.errors import DiptychError, HandOffLost
from services.worker.convert import finish_named

log = logging.getLogger(__name__)


class Submitter(Protocol):
    """Where commands go: the step thread."""

    def submit(self, command: Command) -> None:
        """Hands a command over."""


@dataclass(kw_only=True, slots=True)
class Stream:
    """One request, seen from the event loop. `arrived` is set once its KV came by a hand-off."""

    prompt_tokens: int
    hand_off: HandOff | None
    context: contextvars.Context
    events: asyncio.Queue[Began | Tokens | Finished | Failed] = field(default_factory=asyncio.Queue)
    arrived: Arrived | None = None
    pull: asyncio.Task[None] | None = None
    keep: asyncio.Task[None] | None = None  # renews the hand-off while it waits for blocks


class DecodeService:
    """All requests of this worker, seen from the event loop."""

    def __init__(self, puller: Puller, copier: Copier) -> None:
        self._puller, self._copier = puller, copier
        self._streams: dict[str, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._keys = itertools.count()
        self._thread: Submitter | None = None

    def attach(self, thread: Submitter) -> None:
        """Names the step thread; its `deliver` is ours."""
        self._thread = thread

    @property
    def outstanding(self) -> int:
        """Requests running, and hand-offs still draining."""
        return len(self._streams) + len(self._tasks)

    def new_key(self, request_id: str) -> str:
        """A key for a core's request, unique in this process: a retry may bring the same request id again."""
        return f"{request_id}#{next(self._keys)}"

    def open(self, submit: Submit, hand_off: HandOff | None) -> Stream:
        """Takes a request in. `close` must follow, whatever happens."""
        context = contextvars.copy_context()
        stream = Stream(prompt_tokens=len(submit.token_ids), hand_off=hand_off, context=context)
        self._streams[submit.key] = stream
        self._submit(submit)
        if hand_off:
            stream.keep = self._spawn(self._keep(submit.key, hand_off), context)
            left_s = max(0.0, hand_off.deadline_s - time.monotonic())
            asyncio.get_running_loop().call_later(left_s, self._hand_off_limit, submit.key)
        return stream

    async def events(self, stream: Stream) -> AsyncIterator[Sequence[Began | Tokens | Finished]]:
        """The request's events, as many at once as are there; ends after Finished, raises what it Failed with."""
        while True:
            batch = [await stream.events.get()]
            with contextlib.suppress(asyncio.QueueEmpty):
                while True:
                    batch.append(stream.events.get_nowait())
            good = [event for event in batch if not isinstance(event, Failed)]
            if good:
                yield good
            for event in batch:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    return

    def close(self, key: str) -> None:
        """Forgets the request; what still runs of it is cancelled. Does not wait."""
        stream = self._streams.pop(key)
        self._submit(Cancel(key))
        if stream.keep:
            stream.keep.cancel()
        if stream.pull:
            stream.pull.cancel()
        # Also beside a pull: one that is cancelled before it began has told the sender nothing.
        if stream.hand_off and not stream.arrived:
            self._spawn(self._puller.release(stream.hand_off), stream.context)

    def deliver(self, events: Sequence[Event]) -> None:
        """Takes a step's events."""
        for event in events:
            stream = self._streams.get(event.key)
            if isinstance(event, Reserved):
                self._reserved(event, stream)
            elif isinstance(event, Copy):
                self._spawn(self._copy(event), contextvars.copy_context())
            elif stream:
                stream.events.put_nowait(event)

    def _reserved(self, event: Reserved, stream: Stream | None) -> None:
        if stream is None or stream.hand_off is None:
            self._submit(Drained(event.key))  # closed meanwhile: nothing was ever asked for
            return
        if stream.keep:
            stream.keep.cancel()
        pull = self._pull(event, stream, stream.hand_off)
        stream.pull = self._spawn(pull, stream.context)
        # However the pull ends, even cancelled before it began, nothing writes to the blocks afterwards.
        stream.pull.add_done_callback(lambda _: self._submit(Drained(event.key)))

    async def _pull(self, event: Reserved, stream: Stream, hand_off: HandOff) -> None:
        try:
            arrived = await self._puller.pull(
                hand_off,
                event.blocks,
                tokens=stream.prompt_tokens,
                skip_tokens=event.skip_tokens,
                limit_s=max(0.1, hand_off.deadline_s - time.monotonic()),
            )
        except DiptychError as error:
            self._submit(TransferFailed(event.key, error))
        else:
            stream.arrived = arrived
            finish = finish_named(arrived.finished)
            self._submit(Received(key=event.key, first_token_id=arrived.first_token_id, finish=finish))
        finally:
            stream.pull = None

    async def _copy(self, event: Copy) -> None:
        self._submit(await self._copier.run(event))

    async def _keep(self, key: str, hand_off: HandOff) -> None:
        try:
            await self._puller.keep(hand_off)
        except DiptychError as error:
            self._submit(TransferFailed(key, error))

    def _hand_off_limit(self, key: str) -> None:
        """The time for the hand-off is over: gives up a request that still waits for blocks."""
        stream = self._streams.get(key)
        if stream and not stream.arrived and not stream.pull:
            error = HandOffLost("no free KV blocks on the decode worker within the hand-off limit")
            self._submit(TransferFailed(key, error))

    def _spawn(self, work: Coroutine[None, None, None], context: contextvars.Context) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a hand-off task died: %s", error, exc_info=error)

    def _submit(self, command: Command) -> None:
        assert self._thread is not None, "attach comes before the first request"
        self._thread.submit(command)
