"""The waiting calls of this process in the shared lines.

One task keeps all of them alive in Redis and tells the one at the head of its line how things stand: when a request
was finished, left or admitted anywhere, when workers change, and every REFRESH_S. Who is not at the head sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict

from services.cluster.background import start_loop, stop_loops
from services.cluster.membership import MembershipView
from services.cluster.queue import Gone, LineState, Placed, Queue
from services.cluster.store import StoreUnavailable

REFRESH_S = 1.0
_MEMBERS_S = 60.0
_RESUBSCRIBE_S = 0.5


class Ticket:
    """A call's place in line."""

    def __init__(self, model: str, request_id: str, call: str) -> None:
        self.model, self.request_id, self.call = model, request_id, call
        self._news: LineState | StoreUnavailable | Gone | None = None
        self._arrived = asyncio.Event()

    def tell(self, news: LineState | StoreUnavailable | Gone) -> None:
        """Replaces news that were not read yet."""
        self._news = news
        self._arrived.set()

    async def at_head(self) -> LineState:
        """Waits for news of the line at whose head the request stands. Raises StoreUnavailable, Gone."""
        await self._arrived.wait()
        self._arrived.clear()
        assert self._news is not None
        if isinstance(self._news, LineState):
            return self._news
        raise self._news


class Line:
    """All tickets of this process. `start` and `aclose` around its use."""

    def __init__(self, queue: Queue, view: MembershipView, limit: int) -> None:
        """`limit`: most requests in the line of one model."""
        self._queue, self._view, self._limit = queue, view, limit
        self._tickets: dict[str, Ticket] = {}  # by call
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._tickets)

    async def start(self) -> None:
        """Begins to keep the tickets, until `aclose`."""
        self._tasks = [
            start_loop(self._keep(), "line"),
            start_loop(self._listen(), "line subscription"),
            start_loop(self._watch_members(), "line membership"),
        ]

    async def aclose(self) -> None:
        """Stops; tickets still out are told nothing more."""
        await stop_loops(self._tasks)

    async def join(self, model: str, request_id: str, attempt: int, call: str) -> Ticket | Placed:
        """Takes a place in line, to be given back with `leave`; or what this attempt was told before.

        Raises NotAdmitted, WrongState, StoreUnavailable.
        """
        outcome = await self._queue.enqueue(model, request_id, attempt, call, self._limit)
        if isinstance(outcome, Placed):
            return outcome
        ticket = self._tickets[call] = Ticket(model, request_id, call)
        if outcome.head == request_id:
            ticket.tell(outcome)
        self._wake.set()  # from now on there is somebody to keep alive
        return ticket

    async def leave(self, ticket: Ticket, *, in_line: bool) -> None:
        """Gives the ticket back. `in_line`: the request may still stand in the shared line."""
        self._tickets.pop(ticket.call, None)
        self._wake.set()
        if in_line:
            with contextlib.suppress(StoreUnavailable):  # then it expires by itself
                await self._queue.leave(ticket.model, ticket.request_id, ticket.call)

    async def _keep(self) -> None:
        refreshed_s = float("-inf")
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S if self._tickets else None):
                    await self._wake.wait()
            self._wake.clear()
            if refresh := time.monotonic() - refreshed_s >= REFRESH_S:
                refreshed_s = time.monotonic()
            by_model: defaultdict[str, list[Ticket]] = defaultdict(list)
            for ticket in self._tickets.values():
                by_model[ticket.model].append(ticket)
            for model, tickets in by_model.items():
                await self._tell(model, tickets, refresh=refresh)

    async def _tell(self, model: str, tickets: list[Ticket], *, refresh: bool) -> None:
        """`refresh`: all of them live on; else it only asks who is at the head, however many wait."""
        try:
            state, gone = await self._queue.refresh(model, [one.request_id for one in tickets if refresh])
        except StoreUnavailable as error:
            for ticket in tickets:
                ticket.tell(error)
            return
        for ticket in tickets:
            if ticket.request_id in gone:
                ticket.tell(Gone(f"request {ticket.request_id} is not in line"))
            elif ticket.request_id == state.head:
                ticket.tell(state)

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):  # the membership view says so
                async for _ in self._queue.changes():
                    self._wake.set()
            await asyncio.sleep(_RESUBSCRIBE_S)

    async def _watch_members(self) -> None:
        while True:
            if await self._view.changed(_MEMBERS_S):
                self._wake.set()
