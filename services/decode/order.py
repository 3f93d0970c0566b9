"""Whose turn it is: the policy, told of all that it must know, and what its turns did to the requests.

A row of a step is charged the step's time, a chunk what it would take by itself: rows beside a long prompt have not
used so much time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.decode.requests import MOVING, Request, Requests, Stage
from services.latency import Latency
from services.schedule.policy import Change, Job, Next, Policy
from services.schedule.weights import Weights
from services.worker.turns import chunk_s, prompt_s
from services.worker.work import Work

log = logging.getLogger(__name__)

GUESSED_STEP_S: Final = 0.03
"""Before the first step was measured."""


@dataclass(kw_only=True)
class Order:
    """The order of one worker's requests. `latency` says what it knows of its speed by now."""

    policy: Policy
    requests: Requests
    latency: Callable[[], Latency]
    weights: Weights
    _ran: set[str] = field(default_factory=set, init=False)  # in the last step
    _step_s: float = field(default=GUESSED_STEP_S, init=False)  # of rows alone, lately
    _walk: Sequence[Next] = field(default=(), init=False)  # since the last choice
    _walked: tuple[int, int] = field(default=(0, 0), init=False)  # how far at most, and for which batch

    def arrive(self, request: Request, now_s: float) -> None:
        """It wants to run from now on: at once, as soon as it has memory, or as soon as its KV was handed over."""
        submit = request.submit
        job = Job(
            key=request.key,
            first_step_s=self._first_step_s(request),
            tenant=submit.tenant,
            weight=self.weights.of(submit.tenant),
            priority=submit.priority,
            deadline_s=submit.deadline_s,
            most_tokens=submit.max_new_tokens + (len(submit.token_ids) if submit.local else 0),
        )
        self.policy.arrive(job, now_s)
        request.lowest_level = self.policy.level(request.key)

    def finish(self, request: Request, *, completed: bool) -> None:
        """It is over."""
        self.policy.finish(request.key, completed=completed)
        self._ran.discard(request.key)

    def choose(self, batch: int, now_s: float) -> list[str]:
        """Whose turn it is in the next step, `batch` at most, best first. Who is being received needs no turn."""
        self._walked = (0, 0)
        keys = self.policy.choose(batch + self.requests.count(Stage.RECEIVING), now_s)
        self._note_changes()
        return [key for key in keys if self.requests[key].stage is not Stage.RECEIVING][:batch]

    def ahead(self, limit: int, batch: int, now_s: float) -> Sequence[Next]:
        """The first `limit` in order of estimated next scheduled time, those of the next step included.

        It is a good part of a decision, so all who ask between two choices get the same walk, if it is long enough.
        """
        if self._walked[0] < limit or self._walked[1] != batch:
            length = max(limit, 2 * batch)
            self._walk, self._walked = self.policy.upcoming(length, batch, now_s), (length, batch)
        return self._walk[:limit]

    def step_s(self, keys: Sequence[str]) -> float:
        """Predicted time of a step that decodes a token of each."""
        if not keys or (fit := self.latency().step) is None:
            return self._step_s
        context = sum([len(self.requests[key].sequence.token_ids) for key in keys])
        return fit.step_s(context_tokens=context, batch=len(keys))

    def begin(self, step: Sequence[Request], now_s: float) -> None:
        """A step begins with these: who ran in the one before and could go on is preempted."""
        running = {request.submit.key: request for request in step}
        for key in self._ran.difference(running):
            request = self.requests.get(key)
            if request is not None:
                request.preemptions += 1
                request.note(Change(key=key, what="preempted", at_s=now_s, level=self.policy.level(key)))
        for key, request in running.items():
            waited_s = now_s - (request.ran_s or request.ready_s)
            if request.ready_s:
                request.waited_s += waited_s
            if request.preemptions and key not in self._ran:
                level = self.policy.level(key)
                detail = f"after {waited_s:.3f} s"
                request.note(Change(key=key, what="resumed", at_s=now_s, level=level, detail=detail))
        self._ran = set(running)

    def ran(self, work: Sequence[Work], seconds: float, now_s: float) -> None:
        """They were computed in a step of so many seconds that ends now: who decodes, a row, others a chunk, which may
        be of a single token.
        """
        rows = [item.key for item in work if self.requests[item.key].stage is Stage.RUNNING]
        row_s = seconds
        if len(rows) < len(work):
            row_s = min(seconds, self.step_s(rows))
        if rows:
            self._step_s = row_s
            self.policy.measured(row_s)
            self.policy.ran(rows, row_s, now_s)
        for item in work:
            request, tokens = self.requests[item.key], len(item.slice.token_ids)
            request.ran_s = now_s
            if request.stage is not Stage.RUNNING:
                own_s = chunk_s(self.latency().prefill, item.slice, seconds)
                first = item.slice.wants_logits and not request.generated
                self.policy.computed(item.key, own_s, now_s, tokens=tokens, first=first)
        self._note_changes()

    def stuck(self) -> bool:
        """Nothing that is under way would ever let anybody run again."""
        return not self.requests.count(Stage.RECEIVING, Stage.DRAINING, *MOVING)

    def _first_step_s(self, request: Request) -> float:
        tokens, latency = len(request.submit.token_ids), self.latency()
        if request.local:
            return prompt_s(latency.prefill, tokens)
        return 0.0 if latency.step is None else latency.step.step_s(context_tokens=tokens + 1, batch=1)

    def _note_changes(self) -> None:
        for change in self.policy.take_changes():
            if not change.key:
                log.info("schedule %s: %s", self.policy.name, change.detail)
            elif (request := self.requests.get(change.key)) is not None:
                request.note(change)
