"""Places requests: waits for a worker, waits in line, chooses, records.

Life of a request here: a worker of its model lives (or comes within NO_WORKER_S) → in line → at the head, when the
chosen decode worker has room → placed → finished. Cancelled or past its deadline in line: it leaves the line. Redis
away: it is placed at once from the last known view, counted in this process alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from services.cluster.membership import MembershipView
from services.cluster.queue import Admission, Gone, LineState, Placed, Queue
from services.cluster.record import WorkerRecord
from services.cluster.store import StoreUnavailable
from services.errors import DeadlineExceeded, NotFound, Unavailable
from services.scheduler import admission
from services.scheduler.answer import Answer, read_answer, worker_of
from services.scheduler.line import Line, Ticket
from services.scheduler.placement import Loads, Placement, Refusal, Wanted, choose, counted_tokens, resolve_model

NO_WORKER_S = 3.0
# A placement outlives the deadline of its request by this much before it is taken for lost.
LOST_AFTER_S = 30.0
# A worker that reports no request this long after one was placed on it will not get it any more.
UNCLAIMED_AFTER_S = 5.0
_FORGET_EVERY_S = 1.0
# A heartbeat read just after a placement may be older than it, by the way to the worker.
_HEARTBEAT_LAG_S = 0.1
_REMEMBERED = 16_384

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceCall:
    """One call of Place."""

    request_id: str
    attempt: int
    wanted: Wanted
    limit_s: float  # until the caller's deadline


class Placer:
    """The scheduler's decisions over a shared queue. One per process."""

    def __init__(
        self,
        view: MembershipView,
        queue: Queue,
        line: Line,
        *,
        local_prefill: bool,
        new_id: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`new_id` gives unique names for transfers and calls; `clock` monotonic seconds."""
        self._view, self._queue, self._line = view, queue, line
        self._local_prefill, self._new_id, self._clock = local_prefill, new_id, clock
        self._own: OrderedDict[str, tuple[int, int, Answer]] = OrderedDict()  # request → attempt, tokens, answer
        self._served: set[str] = set()  # every model that was ever served
        self._forgotten_s = float("-inf")
        self._calls: set[asyncio.Task[object]] = set()
        self._draining = False

    async def place(self, call: PlaceCall) -> Answer:
        """Waits until the request may go. Raises Unavailable, NotFound, InvalidArgument, NotAdmitted, WrongState,
        DeadlineExceeded."""
        task = asyncio.current_task()
        assert task is not None
        if self._draining:
            raise Unavailable("this scheduler is stopping")
        self._calls.add(task)
        try:
            async with asyncio.timeout(call.limit_s):
                return await self._place(call)
        except TimeoutError:
            raise DeadlineExceeded(f"waited {call.limit_s:.1f} s in line") from None
        except asyncio.CancelledError:
            if not self._draining:
                raise
            task.uncancel()
            raise Unavailable("this scheduler is stopping") from None
        finally:
            self._calls.discard(task)

    async def finish(self, request_id: str) -> None:
        """Frees what the request was counted for. When Redis is away, the shared count ends with its time."""
        self._own.pop(request_id, None)
        with contextlib.suppress(StoreUnavailable):
            await self._queue.finish(request_id)

    async def queued_requests(self) -> int:
        """Requests waiting in all lines; those of this process when Redis is away."""
        if not self._queue.available:
            return len(self._line)
        models = {worker.record.model for worker in self._view.workers()}
        try:
            return sum([(await self._queue.refresh(model, []))[0].length for model in models])
        except StoreUnavailable:
            return len(self._line)

    def drain(self) -> None:
        """Ends all waiting calls with Unavailable, and all later ones."""
        self._draining = True
        for task in self._calls:
            task.cancel()

    async def _place(self, call: PlaceCall) -> Answer:
        model = await self._when_possible(lambda: self._resolve(call.wanted.model))
        await self._when_possible(lambda: self._choose(call, Loads()))
        if self._queue.available:
            try:
                return await self._place_in_line(call, model)
            except StoreUnavailable as error:
                log.error("%s", error)
        return await self._place_alone(call)

    async def _when_possible(self, attempt: Callable[[], T | Refusal]) -> T:
        """Repeats `attempt` while it is refused for a passing reason, as workers change, for NO_WORKER_S."""
        give_up_s = self._clock() + NO_WORKER_S
        while isinstance(outcome := attempt(), Refusal):
            left_s = give_up_s - self._clock()
            if not outcome.passing or left_s <= 0:
                raise outcome.error
            await self._view.changed(left_s)
        return outcome

    async def _place_in_line(self, call: PlaceCall, model: str) -> Answer:
        while True:
            ticket = await self._line.join(model, call.request_id, call.attempt, self._new_id())
            if isinstance(ticket, Placed):
                return self._remember(call, read_answer(ticket.answer), tokens=0)
            in_line = True
            try:
                answer = await self._wait_at(ticket, call)
                in_line = False
                return answer
            except Gone:  # Redis was emptied, or another call of the same attempt was placed
                in_line = False
            except StoreUnavailable:  # the place expires by itself
                in_line = False
                raise
            finally:
                await self._line.leave(ticket, in_line=in_line)

    async def _wait_at(self, ticket: Ticket, call: PlaceCall) -> Answer:
        refused_s: float | None = None
        while True:
            state = await ticket.at_head()
            choice = self._choose(call, self._loads(state))
            if isinstance(choice, Refusal):
                refused_s = self._clock() if refused_s is None else refused_s
                if not choice.passing or self._clock() - refused_s > NO_WORKER_S:
                    raise choice.error
                continue
            refused_s = None
            proposal = self._admission(call, choice)
            load = state.decode_tokens.get(proposal.decode, 0)
            if not admission.has_room(load, proposal.tokens, proposal.bound_tokens):
                await self._forget_unclaimed(state)
                continue
            outcome = await self._admit(ticket.model, proposal)
            if isinstance(outcome, Placed):
                return self._remember(call, read_answer(outcome.answer), tokens=proposal.tokens)

    async def _admit(self, model: str, proposal: Admission) -> Placed | LineState:
        try:
            return await self._queue.admit(model, proposal)
        except asyncio.CancelledError:
            # It may have been placed all the same, and the caller's Finish may have come before that.
            with contextlib.suppress(StoreUnavailable):
                await self._queue.finish(proposal.request_id, proposal.answer)
            raise

    async def _place_alone(self, call: PlaceCall) -> Answer:
        """Without the shared line: at once, on what the last view shows."""
        known = self._own.get(call.request_id)
        if known is not None and known[0] == call.attempt:
            return known[2]
        loads: defaultdict[str, int] = defaultdict(int)
        for _, tokens, answer in self._own.values():
            loads[answer.decode.incarnation] += tokens
        choice = await self._when_possible(lambda: self._choose(call, Loads(decode=loads)))
        proposal = self._admission(call, choice)
        log.error("Redis is away: placed %s without the shared line", call.request_id)
        return self._remember(call, read_answer(proposal.answer), tokens=proposal.tokens)

    def _records(self) -> list[WorkerRecord]:
        records = [worker.record for worker in self._view.workers()]
        self._served.update(record.model for record in records if record.role == "decode")
        return records

    def _resolve(self, model: str) -> str | Refusal:
        return self._soften(resolve_model(self._records(), model), model)

    def _choose(self, call: PlaceCall, loads: Loads) -> Placement | Refusal:
        choice = choose(self._records(), call.wanted, loads, local_prefill=self._local_prefill)
        return self._soften(choice, call.wanted.model)

    def _soften(self, outcome: T | Refusal, model: str) -> T | Refusal:
        # The only worker of a model may just be restarting, while others live.
        if isinstance(outcome, Refusal) and isinstance(outcome.error, NotFound) and model in self._served:
            return Refusal(error=Unavailable(f"no decode worker of model {model!r} lives"), passing=True)
        return outcome

    def _loads(self, state: LineState) -> Loads:
        age_s = {worker.record.incarnation: worker.heartbeat_age_s for worker in self._view.workers()}
        recent: defaultdict[str, int] = defaultdict(int)
        for prompts in state.recent:
            if prompts.age_s < age_s.get(prompts.prefill, 0.0) + _HEARTBEAT_LAG_S:
                recent[prompts.prefill] += prompts.prompt_tokens
        return Loads(decode=state.decode_tokens, prefill=recent)

    def _admission(self, call: PlaceCall, choice: Placement) -> Admission:
        wanted, decode, prefill = call.wanted, choice.decode, choice.prefill
        answer = Answer(
            transfer_id=self._new_id(),
            decode=worker_of(decode),
            prefill=None if prefill is None else worker_of(prefill),
            local_reason=choice.local_reason,
        )
        tokens = counted_tokens(decode, wanted)
        return Admission(
            request_id=call.request_id,
            attempt=call.attempt,
            decode=decode.incarnation,
            tokens=tokens,
            bound_tokens=admission.bound_tokens(decode),
            prefill="" if prefill is None else prefill.incarnation,
            prompt_tokens=wanted.prompt_tokens,
            live_s=call.limit_s + LOST_AFTER_S,
            answer=answer.to_json(),
        )

    async def _forget_unclaimed(self, state: LineState) -> None:
        """A gateway that died finishes nothing; its workers notice, and report to be idle."""
        idle = [
            worker.record.incarnation
            for worker in self._view.workers()
            if worker.record.idle and state.decode_tokens.get(worker.record.incarnation, 0) > 0
        ]
        if idle and self._clock() - self._forgotten_s >= _FORGET_EVERY_S:
            self._forgotten_s = self._clock()
            if forgotten := await self._queue.forget(idle, UNCLAIMED_AFTER_S):
                log.warning("forgot %d placements that nobody finished, on idle workers", forgotten)

    def _remember(self, call: PlaceCall, answer: Answer, *, tokens: int) -> Answer:
        self._own[call.request_id] = (call.attempt, tokens, answer)
        self._own.move_to_end(call.request_id)
        if len(self._own) > _REMEMBERED:
            self._own.popitem(last=False)
        return answer
