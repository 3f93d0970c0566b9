"""What both doors call: one request in, a stream of events out; which models are there; whether one is served now.

Each request lives in a task of its own, so that a client that goes away, at whatever moment, ends it by one cancel, and
everything inside it (deadlines, task groups, spans) begins and ends in the same task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.errors import DiptychError, Unavailable
from services.gateway.generate import Event, Life
from services.gateway.mesh import Mesh
from services.gateway.request import GenerationRequest

_LIST_LIMIT_S = 2.0


class EventStream:
    """The events of a request. Neighbours of one answer that wait for a slow client are joined.

    max_tokens and the number of answers bound how much can wait.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._waiting: deque[Event | None] = deque()  # taken from the queue, and not yet its turn
        self._task: asyncio.Task[None] | None = None

    def emit(self, event: Event) -> None:
        """Adds an event."""
        self._events.put_nowait(event)

    def follow(self, task: asyncio.Task[None]) -> None:
        """The stream ends when `task` does, and as it does."""
        self._task = task
        task.add_done_callback(lambda _: self._events.put_nowait(None))

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        event = self._waiting.popleft() if self._waiting else await self._events.get()
        if event is None:
            self._waiting.append(None)  # asked again, the answer is the same
            self._raise()
            raise StopAsyncIteration
        while event.finish is None and not self._events.empty():
            following = self._events.get_nowait()
            if following is None or following.index != event.index:
                self._waiting.append(following)
                break
            event = _joined(event, following)
        return event

    def _raise(self) -> None:
        task = self._task
        if task is None or not task.done():
            return
        if task.cancelled():
            # Not by the client, who is listening: `drain` cut it off.
            raise Unavailable("the gateway is shutting down")
        if (error := task.exception()) is not None:
            raise error


def _joined(first: Event, second: Event) -> Event:
    return Event(
        text=first.text + second.text,
        token_ids=[*first.token_ids, *second.token_ids],
        index=first.index,
        finish=second.finish,
        logprobs=[*first.logprobs, *second.logprobs],
        shown=[*first.shown, *second.shown],
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelView:
    """A served model; the context is the smallest of its live workers."""

    name: str
    context_tokens: int


class Gateway:
    """The running gateway, without its doors."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        request_limit_s: float,
        expect_prefill: int,
        expect_decode: int,
        new_id: Callable[[], str],
    ) -> None:
        self.mesh = mesh
        self.new_id = new_id
        self._limit_s = request_limit_s
        self._expected = {"prefill": expect_prefill, "decode": expect_decode}
        self._lives: set[asyncio.Task[None]] = set()
        self._draining = False

    @asynccontextmanager
    async def answering(
        self, request: GenerationRequest, *, request_id: str, limit_s: float | None = None
    ) -> AsyncIterator[EventStream]:
        """Serves a request for as long as the block lasts; leaving the block early cancels it and waits for that.

        `limit_s` is what the call itself has left. Errors, bad input included, come out of the stream.
        """
        if self._draining:
            raise Unavailable("the gateway is shutting down")
        stream = EventStream(request_id)
        limit_s = self._limit_s if limit_s is None else min(self._limit_s, limit_s)
        life = Life(self.mesh, request, request_id, limit_s, stream.emit)
        task = asyncio.create_task(life.run(), name=f"request-{request_id}")
        self._lives.add(task)
        stream.follow(task)
        try:
            yield stream
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # taken note of, also when nobody read the stream to its end
            self._lives.discard(task)

    async def models(self) -> list[ModelView]:
        """The model, where live decode workers serve it."""
        model = self.mesh.model
        workers = await self.mesh.scheduler.workers(_LIST_LIMIT_S)
        contexts = [w.context_tokens or model.context_tokens for w in workers if w.ready and w.model == model.name]
        return [ModelView(name=model.name, context_tokens=min(model.context_tokens, *contexts))] if contexts else []

    async def not_ready(self) -> str:
        """Why no request can be served now; empty when one can."""
        if self._draining:
            return "shutting down"
        try:
            workers = await self.mesh.scheduler.workers(_LIST_LIMIT_S)
        except DiptychError as error:
            return str(error)
        missing = []
        for role, expected in self._expected.items():
            ready = sum(w.ready and w.role == role and w.model == self.mesh.model.name for w in workers)
            if ready < expected:
                missing.append(f"{ready} of {expected} {role} workers are ready")
        return "; ".join(missing)

    async def drain(self, grace_s: float) -> None:
        """Takes no new requests; waits `grace_s` for the running ones, then cancels them."""
        self._draining = True
        running = set(self._lives)
        if running:
            _, late = await asyncio.wait(running, timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1.0)
