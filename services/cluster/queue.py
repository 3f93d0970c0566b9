"""The lines of waiting requests and what is placed on whom: what all schedulers share, in Redis.

Life of a request here: enqueue (at the end of its model's line; asking again keeps the place) → refresh while it waits
→ admit, when it is the head and its decode worker has room → finish. A cancelled one leaves. A waiter that nobody
refreshes is dropped after WAITER_TTL_S, so that it never blocks the line; a placement that nobody finishes is dropped
when its time is over, or by `forget` when its worker turns out to be without work.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from services.cluster import keys
from services.cluster.store import Reply, Store, strings
from services.errors import DiptychError, NotAdmitted, WrongState

WAITER_TTL_S = 3.0
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecentPrompts:
    """Prompts placed on a prefill worker within a tenth of a second, a moment ago: its next heartbeat may not count
    them yet.
    """

    prefill: str  # incarnation
    prompt_tokens: int
    age_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LineState:
    """A line at one moment."""

    head: str  # request at its head; empty when nobody waits
    length: int
    decode_tokens: Mapping[str, int]  # placed and unfinished, by decode incarnation
    recent: Sequence[RecentPrompts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """A placement to be recorded."""

    request_id: str
    attempt: int
    decode: str  # incarnation
    tokens: int  # counted against the decode worker until the request is finished
    bound_tokens: int  # most tokens on the decode worker; a single request always fits
    prefill: str  # incarnation; empty for a local prefill
    prompt_tokens: int
    live_s: float  # forgotten after that, if nobody finishes it
    answer: str  # what a repeated call is told


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """The request is placed; `answer` is what was recorded when it was."""

    answer: str


class Gone(DiptychError):
    """The request is not in line (any more); the waiter may enqueue again."""


class Queue:
    """The shared lines. All operations raise StoreUnavailable, and are safe to repeat."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def available(self) -> bool:
        """Whether Redis answered the last time it was asked; when it did not, asking costs time."""
        return self._store.available

    async def enqueue(self, model: str, request_id: str, attempt: int, call: str, limit: int) -> Placed | LineState:
        """Joins the line of `model`, or keeps the place there; `call` names the waiter from now on.

        Returns what this attempt was told before, if it was placed before. Raises NotAdmitted when `limit` requests
        wait already, WrongState when a later attempt was placed.
        """
        reply = await self._run(model, "enqueue", request_id, attempt, call, _ms(WAITER_TTL_S), limit)
        if reply[0] == "full":
            raise NotAdmitted(f"{reply[1]} requests are waiting already", retry_after_s=RETRY_AFTER_S)
        if reply[0] == "stale":
            raise WrongState(f"a later attempt than {attempt} of request {request_id} was placed already")
        return Placed(answer=str(reply[1])) if reply[0] == "placed" else _state(reply[1])

    async def refresh(self, model: str, request_ids: Sequence[str]) -> tuple[LineState, frozenset[str]]:
        """Keeps waiters alive; returns the line's state and those that are not in it."""
        reply = await self._run(model, "refresh", _ms(WAITER_TTL_S), *request_ids)
        return _state(reply[0]), frozenset(strings(reply[1]))

    async def admit(self, model: str, admission: Admission) -> Placed | LineState:
        """Places the head of the line and records it; a LineState when it is not the head or finds no room.

        Raises Gone when the request is not in line.
        """
        reply = await self._run(
            *(model, "admit", admission.request_id, admission.attempt, admission.decode, admission.tokens),
            *(admission.bound_tokens, admission.prefill, admission.prompt_tokens, _ms(admission.live_s)),
            admission.answer,
        )
        if reply[0] == "gone":
            raise Gone(f"request {admission.request_id} is not in line")
        return Placed(answer=str(reply[1])) if reply[0] == "placed" else _state(reply[1])

    async def finish(self, request_id: str, answer: str = "") -> None:
        """Forgets the request's placement, or only the one recorded with `answer`; unknown ids are fine."""
        await self._run("", "finish", request_id, answer)

    async def leave(self, model: str, request_id: str, call: str) -> None:
        """Takes the request out of the line, unless another call waits for it by now."""
        await self._run(model, "leave", request_id, call)

    async def forget(self, incarnations: Sequence[str], older_than_s: float) -> int:
        """Drops what was placed on these decode workers longer ago than that; returns how many requests that were."""
        reply = await self._run("", "forget", _ms(older_than_s), *incarnations)
        return int(str(reply[0]))

    def changes(self) -> AsyncIterator[None]:
        """Yields when subscribed and whenever the head of some line may go. Raises StoreUnavailable when it is lost."""
        return self._store.listen(keys.LINE_CHANGED)

    async def _run(self, model: str, operation: str, *arguments: str | int) -> list[Reply]:
        line_keys = [keys.line(model), keys.line_alive(model), keys.line_owner(model), keys.SEQUENCE]
        shared_keys = [keys.PLACED, keys.PLACED_EXPIRY, keys.LOAD, keys.RECENT]
        reply = await self._store.run("queue", line_keys + shared_keys, [keys.LINE_CHANGED, operation, *arguments])
        if not isinstance(reply, list):
            raise TypeError(f"{operation}: unexpected reply {reply!r}")
        return reply


def _state(reply: Reply) -> LineState:
    if not isinstance(reply, str):
        raise TypeError(f"unexpected state of a line: {reply!r}")
    state = json.loads(reply)
    return LineState(
        head=state["head"],
        length=state["length"],
        decode_tokens=state["load"],
        recent=tuple(
            RecentPrompts(prefill=prefill, prompt_tokens=tokens, age_s=age_ms / 1000)
            for prefill, prompts in state["recent"].items()
            for tokens, age_ms in prompts
        ),
    )


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
