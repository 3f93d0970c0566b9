"""One placement: both legs at once, until the answer is finished or a leg is lost.

- Tokens of both legs go to the answer, which knows duplicates from gaps.
- The first leg that fails cancels the other, and the caller hears of it at once. A prefill leg that fails after the
  hand-off (decode has brought tokens) no longer matters.
- Log-probabilities of the prompt and the first token come from the prefill leg alone: where they were asked for, the
  tokens of decode wait for it, and it matters to its end.
- Decode does not hear of the log-probabilities of a prompt that prefill computes.
- An answer that is finished by the first token or a stop string cancels what still runs. After decode's last message
  its stream ends by itself: to cancel it would only look like a client that left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from services.engine.sampling_spec import TokenLogprobs
from services.errors import DiptychError
from services.gateway.answer import Answer, FinishReason, Piece
from services.gateway.peers import WorkerClient
from services.gateway.placement import DecodeTokens, LegFailed, LegReports, LegWork, Placement

log = logging.getLogger(__name__)

_END_GRACE_S = 1.0  # how long a finished answer waits for the ends of its legs, and for the numbers they bring


class Legs:
    """The legs of one placement. `emit` gets each new piece but the last, which `run` returns.

    `has_kv` is called, perhaps several times, when the decode worker has the KV of the whole prompt and the answer goes
    on. Once it is over, `kv_arrived` says whether the worker had it.
    """

    def __init__(
        self,
        workers: WorkerClient,
        placement: Placement,
        answer: Answer,
        emit: Callable[[Piece], None],
        has_kv: Callable[[], None],
    ) -> None:
        self.reports = LegReports()
        self.handed_over = placement.prefill is None  # decode has brought tokens: it holds the KV
        self._workers, self._placement = workers, placement
        self._answer, self._emit, self._has_kv = answer, emit, has_kv
        self.kv_arrived = False
        self._last: Piece | None = None
        self._prompt_logprobs: Sequence[TokenLogprobs] = ()  # not handed out yet
        self._prefilled = asyncio.Event()
        self._decoded = False  # decode has sent its last message
        self._over = asyncio.Event()

    async def run(self, work: LegWork, deadline_s: float) -> Piece:
        """Runs both legs to the end of the answer and returns its last piece. Raises LegFailed or DiptychError."""
        self._answer.begin_leg()
        try:
            async with asyncio.TaskGroup() as group:
                legs = [group.create_task(self._decode(work, deadline_s))]
                if self._placement.prefill is not None:
                    legs.append(group.create_task(self._prefill(work, deadline_s)))
                await self._over.wait()
                await self._let_end(*legs)
                for leg in legs:
                    leg.cancel()
        except BaseExceptionGroup as group_of_errors:
            raise _first(group_of_errors) from None
        if self._last is None:
            raise DiptychError("the legs ended without an answer")
        return self._last

    async def _prefill(self, work: LegWork, deadline_s: float) -> None:
        try:
            report = await self._workers.prefill(work, self._placement, deadline_s)
        except LegFailed as failed:
            if _waits_for_prefill(work) or not (self.handed_over or self._over.is_set()):
                raise
            log.info("a prefill leg failed after its hand-off, which no longer matters: %s", failed)
            return
        self.reports.prefill = report
        self._prompt_logprobs = report.prompt_logprobs
        self._take(0, [report.token_id], report.reason, () if report.logprobs is None else (report.logprobs,))
        self._prefilled.set()

    async def _decode(self, work: LegWork, deadline_s: float) -> None:
        try:
            wanted = work if self._placement.prefill is None else _without_prompt_logprobs(work)
            async with aclosing(self._workers.decode(wanted, self._placement, deadline_s)) as messages:
                async for message in messages:
                    self.handed_over = True
                    self._decoded = message.reason is not None
                    self.reports.decode = message.begin or self.reports.decode
                    self.reports.turns = message.turns or self.reports.turns
                    if self._placement.prefill is not None and _waits_for_prefill(work):
                        await self._prefilled.wait()
                    elif message.begin is not None:
                        self._prompt_logprobs = message.begin.prompt_logprobs
                    self._take(message.offset, message.token_ids, message.reason, message.logprobs)
                    self.kv_arrived = self.kv_arrived or self._shows_kv(message)
                    if self.kv_arrived and not self._over.is_set():
                        self._has_kv()
        except LegFailed as failed:
            if not self._over.is_set():
                raise
            log.info("a decode leg failed after the end of its answer: %s", failed)
        if not self._over.is_set():
            raise DiptychError(f"{self._placement.decode.name} ended its stream without a finish")

    def _shows_kv(self, message: DecodeTokens) -> bool:
        """A hand-off that ends with the first token need not bring the KV."""
        goes_on = message.reason is None or message.offset + len(message.token_ids) > 1
        return goes_on or self._placement.prefill is None

    def _take(
        self,
        offset: int,
        token_ids: Sequence[int],
        reason: FinishReason | None,
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        piece = self._answer.accept(offset, token_ids, reason, logprobs)
        if piece is None:
            return
        if self._prompt_logprobs:
            piece, self._prompt_logprobs = replace(piece, prompt_logprobs=self._prompt_logprobs), ()
        if piece.reason is None:
            self._emit(piece)
        else:
            self._last = piece
            self._over.set()

    async def _let_end(self, decode: asyncio.Task[None], *prefill: asyncio.Task[None]) -> None:
        """Decode's stream ends by itself after its last message. Decode may get there before prefill's answer, which
        has numbers that the client is promised.
        """
        ending = [decode] if self._decoded else []
        if self.reports.decode is not None and self.reports.prefill is None:
            ending += prefill
        if ending:
            await asyncio.wait(ending, timeout=_END_GRACE_S)


def _waits_for_prefill(work: LegWork) -> bool:
    return work.sampling.logprobs is not None or work.sampling.prompt_logprobs is not None


def _without_prompt_logprobs(work: LegWork) -> LegWork:
    return replace(work, sampling=replace(work.sampling, prompt_logprobs=None))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that the group is about; a lost leg before anything that followed from it."""
    return next((error for error in group.exceptions if isinstance(error, LegFailed)), group.exceptions[0])
