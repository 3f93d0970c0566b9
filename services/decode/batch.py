"""The requests of the next step: whose turn it is, as far as there is room and a token budget, and who else fits in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.decode.memory import Memory
from services.decode.order import Order
from services.decode.requests import RESIDENT, Request, Stage


@dataclass(kw_only=True)
class Batch:
    """Puts steps together: at most `max_batch` requests, with at most `chunk_tokens` prompt tokens."""

    memory: Memory
    order: Order
    chunk_tokens: int
    max_batch: int

    def next(self, now_s: float) -> list[Request]:
        """The requests of the next step, in order. As many are chosen as a step may have and as have room together."""
        batch, others = self.max_batch, []
        chosen = self.order.choose(batch, now_s)
        if (fitting := self.memory.fitting(chosen)) < len(chosen):
            batch, others = fitting, chosen[fitting:]
            chosen = self.order.choose(batch, now_s)
        plan = self.memory.plan(chosen, self.order, batch, now_s)
        step = self._within_budget(self.memory.carry_out(plan, now_s))
        if self.memory.waits:
            return []
        if others or len(step) < self.max_batch == len(chosen):
            step = self._filled(step, others, now_s)
        if step or not self.order.stuck():
            self._admit_ahead(chosen, now_s)
            return step
        return self._clear_the_way(chosen[0], now_s)

    def _within_budget(self, step: Sequence[Request]) -> list[Request]:
        """Those that compute something: not the prompts that chunks before theirs leave no token for."""
        budget, within = self.chunk_tokens, []
        for request in step:
            if request.stage is Stage.RUNNING or budget > 0:
                within.append(request)
                budget -= _prompt_tokens(request)
        return within

    def _filled(self, step: Sequence[Request], others: Sequence[str], now_s: float) -> list[Request]:
        """Gives the places of those that were chosen and do not step to others that are here and can."""
        filled, taken = list(step), {request.key for request in step}
        budget = self.chunk_tokens - sum(map(_prompt_tokens, step))
        for key in self._later(others, now_s):
            if len(filled) == self.max_batch:
                break
            request = self.memory.requests[key]
            if key not in taken and request.stage in RESIDENT and self.memory.ready(request, self.max_batch, now_s):
                taken.add(key)
                if request.stage is Stage.RUNNING or budget > 0:
                    filled.append(request)
                    budget -= _prompt_tokens(request)
        return filled

    def _later(self, others: Sequence[str], now_s: float) -> Iterator[str]:
        """Whose turn comes next; then who decodes here, however many prompts are to be computed before; those that are
        pinned at last, so that they get their token.
        """
        yield from others
        yield from [one.key for one in self.order.ahead(2 * self.max_batch, self.max_batch, now_s)]
        decoding = list(self.memory.requests.within(Stage.RUNNING))
        times = dict(zip(decoding, self.order.policy.enst_s(decoding, self.max_batch, now_s), strict=True))
        yield from sorted(decoding, key=times.__getitem__)
        yield from tuple(self.memory.requests.pinned)

    def _admit_ahead(self, chosen: Sequence[str], now_s: float) -> None:
        """Gives what is free to those that wait, oldest first, while nobody whose turn it is lacks room: hand-offs need
        not wait for theirs, and prefill is rid of them.
        """
        requests = self.memory.requests
        if requests.count(Stage.SWAPPED) or any(requests[key].stage is Stage.WAITING for key in chosen):
            return
        while request := next(iter(requests.within(Stage.WAITING).values()), None):
            if not self.memory.admit(request, now_s):
                return

    def _clear_the_way(self, first: str, now_s: float) -> list[Request]:
        """Nobody can run, and nothing is under way that would change it: others are dropped until the first one can."""
        request = self.memory.requests[first]
        others = [key for stage in RESIDENT for key in self.memory.requests.within(stage) if key != first]
        while True:
            if request.stage is Stage.SWAPPED:
                if self.memory.bring_back(request, now_s):
                    return []
            elif self.memory.ready(request, 1, now_s):
                return [request]
            if request.stage is Stage.RECEIVING:
                return []
            self.memory.drop(self.memory.requests[others.pop()], now_s)


def _prompt_tokens(request: Request) -> int:
    """What it takes of a step's budget of prompt tokens, if there is so much."""
    return request.sequence.pending if request.stage is Stage.COMPUTING else 0
