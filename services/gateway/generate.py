"""A request's life at the gateway.

1. Validate, render, tokenize: everything that can be refused is refused here.
2. Place, run both legs (`legs`), hand every new piece to the client's stream.
3. A leg is lost: place again, away from the worker that failed, and go on after the last token (`Recovery`).
4. The end, whichever it is (answer, error, cancel, deadline): the scheduler and the workers are told.
Cancel: the task of the request is cancelled, with it every call it made. Deadline: the same, with DeadlineExceeded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.engine.sampling_spec import TokenLogprobs
from services.errors import DeadlineExceeded, DiptychError, Unavailable
from services.gateway.answer import Answer, LoggedToken, Piece
from services.gateway.closing import Closing
from services.gateway.echo import Echo, tokenize
from services.gateway.legs import Legs
from services.gateway.metrics import Metrics
from services.gateway.peers import SchedulerClient, WorkerClient
from services.gateway.placement import (
    Finish,
    LegFailed,
    LegReports,
    LegWork,
    Phases,
    Placement,
    PlaceWish,
    Usage,
    Worker,
)
from services.gateway.recovery import Recovery
from services.gateway.request import GenerationRequest, check_length, check_prompt_logprobs, fit, validate
from services.gateway.text import Tokenizer
from services.rpc.options import MAX_MESSAGE_BYTES
from services.telemetry import context, spans
from services.telemetry.tracing import tracer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The model behind this gateway."""

    name: str
    vocab: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """What a request needs of the process it lives in. `draw_seed` gives 64 random bits."""

    model: Served
    tokenizer: Tokenizer
    scheduler: SchedulerClient
    workers: WorkerClient
    metrics: Metrics
    closing: Closing
    draw_seed: Callable[[], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A part of the answer, see Piece; `finish` on the last one."""

    text: str
    token_ids: Sequence[int]
    finish: Finish | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    shown: Sequence[LoggedToken] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()

    @classmethod
    def of(cls, piece: Piece, finish: Finish | None = None) -> Event:
        """The event that a piece is."""
        return cls(
            text=piece.text,
            token_ids=piece.token_ids,
            finish=finish,
            logprobs=piece.logprobs,
            shown=piece.shown,
            prompt_logprobs=piece.prompt_logprobs,
        )


class Life:
    """One request, from its arrival (`now`) to its end. `emit` gets every event."""

    def __init__(
        self, mesh: Mesh, request: GenerationRequest, request_id: str, limit_s: float, emit: Callable[[Event], None]
    ) -> None:
        self._mesh, self._emit = mesh, emit
        self._arrived_s = time.monotonic()
        self._deadline_s = self._arrived_s + min(limit_s, request.deadline_s or limit_s)
        self._id = request_id
        seed = mesh.draw_seed() if request.sampling.seed is None else request.sampling.seed
        self._request = replace(request, sampling=replace(request.sampling, seed=seed))
        self._ends = () if request.ignore_eos else mesh.model.eos_token_ids
        self._answer: Answer  # once the request is known to be valid
        self._prompt: list[int] = []
        self._echo: Echo | None = None  # until it is shown, with the first piece
        self._max_new = 0
        self._tokenize_s: float | None = None
        self._queue_s = 0.0
        self._cached_tokens = 0
        self._placements = 0
        self._first_noted = False

    async def run(self) -> None:
        """Lives it. Raises a DiptychError for everything that is not an answer."""
        context.request_id.set(self._id)
        with tracer().start_as_current_span(spans.GATEWAY_REQUEST) as span:
            span.set_attributes({"diptych.request_id": self._id, "diptych.model": self._mesh.model.name})
            with self._mesh.metrics.running():
                finish = await self._within_deadline()
                self._log(finish)
                span.set_attributes(
                    {
                        "diptych.prompt_tokens": finish.usage.prompt_tokens,
                        "diptych.completion_tokens": finish.usage.completion_tokens,
                        "diptych.finish_reason": finish.reason,
                    }
                )

    def _log(self, finish: Finish) -> None:
        usage, client_id = finish.usage, self._request.client_request_id
        log.info(
            "%s after %d + %d tokens, %d placements%s",
            finish.reason,
            usage.prompt_tokens,
            usage.completion_tokens,
            finish.phases.placements,
            f", client's id {client_id!r}" if client_id else "",
        )

    async def _within_deadline(self) -> Finish:
        loop = asyncio.get_running_loop()
        left_s = self._deadline_s - time.monotonic()
        try:
            async with asyncio.timeout_at(loop.time() + left_s) as limit:
                return await self._live()
        except TimeoutError:
            if not limit.expired():
                raise
            given_s = self._deadline_s - self._arrived_s
            raise DeadlineExceeded(f"the {given_s:g} s given to the request are over") from None

    async def _live(self) -> Finish:
        await self._tokenize()
        try:
            piece, placement, reports = await self._place_until_answered()
        finally:
            if self._placements:
                self._mesh.closing.finish(self._id)
        self._note_first_token()
        piece = self._with_echo(piece)
        finish = self._finish(piece, placement, reports)
        self._mesh.metrics.finished(finish)
        self._emit(Event.of(piece, finish))
        return finish

    async def _tokenize(self) -> None:
        model, request = self._mesh.model, self._request
        validate(request, model=model.name, vocab=model.vocab)
        longest_token = self._mesh.tokenizer.longest_token
        check_length(request.prompt, longest_token=longest_token, context_tokens=model.context_tokens)
        with tracer().start_as_current_span(spans.GATEWAY_TOKENIZE):
            # A thread: a long prompt would hold up everybody else's tokens.
            self._prompt, self._echo = await asyncio.to_thread(tokenize, self._mesh.tokenizer, request)
        self._tokenize_s = time.monotonic() - self._arrived_s
        check_prompt_logprobs(request, len(self._prompt), max_bytes=MAX_MESSAGE_BYTES)
        self._max_new = fit(request.prompt, len(self._prompt), request.max_tokens, context_tokens=model.context_tokens)
        self._answer = Answer(
            decode=self._mesh.tokenizer.decode,
            stops=request.stop,
            end_token_ids=frozenset(self._ends),
            clock=time.monotonic,
            echo_chars=0 if self._echo is None else len(self._echo.text),
        )

    async def _place_until_answered(self) -> tuple[Piece, Placement, LegReports]:
        recovery = Recovery()
        while True:
            self._placements += 1
            placement = await self._mesh.scheduler.place(self._wish(recovery.avoid), self._deadline_s)
            self._queue_s += placement.queue_s
            legs = Legs(self._mesh.workers, placement, self._answer, self._emit_piece)
            try:
                piece = await legs.run(self._work(), self._deadline_s)
                return piece, placement, legs.reports
            except LegFailed as failed:
                if not recovery.again(failed, started=bool(self._answer.token_ids)):
                    raise _final(failed.error) from failed
                log.warning("placement %d was lost, placing again: %s", self._placements, failed)
                self._mesh.metrics.placement_lost()
            finally:
                self._note(legs, placement)

    def _note(self, legs: Legs, placement: Placement) -> None:
        """A placement is over, well or not: what it said, and what nobody else will clean up."""
        # Where the prompt was computed; a later placement's prompt holds tokens that are not the client's.
        computed = legs.reports.prefill if placement.prefill is not None else legs.reports.decode
        if self._placements == 1 and computed is not None:
            self._cached_tokens = computed.cached_tokens
        if not legs.handed_over and legs.reports.prefill is not None and legs.reports.prefill.reason is None:
            # Prefill has answered and keeps the KV; a decode leg that was ended early may never come for it.
            self._mesh.closing.release(placement)

    def _emit_piece(self, piece: Piece) -> None:
        self._note_first_token()
        self._emit(Event.of(self._with_echo(piece)))

    def _with_echo(self, piece: Piece) -> Piece:
        echo, self._echo = self._echo, None
        return piece if echo is None else echo.lead(piece)

    def _note_first_token(self) -> None:
        if self._answer.first_token_s is not None and not self._first_noted:
            self._first_noted = True
            self._mesh.metrics.first_token(self._answer.first_token_s - self._arrived_s)

    def _wish(self, avoid: Sequence[Worker]) -> PlaceWish:
        done = len(self._answer.token_ids)
        return PlaceWish(
            request_id=self._id,
            attempt=self._placements,
            model=self._mesh.model.name,
            prompt_tokens=len(self._prompt) + done,
            max_new_tokens=self._max_new - done,
            tenant=self._request.tenant,
            priority=self._request.priority,
            slo=self._request.slo,
            avoid=avoid,
        )

    def _work(self) -> LegWork:
        done, sampling = self._answer.token_ids, self._request.sampling
        return LegWork(
            request_id=self._id,
            token_ids=[*self._prompt, *done],
            prompt_tokens=len(self._prompt),
            # Once there are tokens, the client has those of the prompt.
            sampling=replace(sampling, prompt_logprobs=None) if done else sampling,
            max_new_tokens=self._max_new - len(done),
            stop_token_ids=self._ends,
            tenant=self._request.tenant,
            priority=self._request.priority,
        )

    def _finish(self, piece: Piece, placement: Placement, reports: LegReports) -> Finish:
        if piece.reason is None:
            raise DiptychError("an answer ended without a reason")
        usage = Usage(
            prompt_tokens=len(self._prompt),
            completion_tokens=0 if self._request.echo == "instead" else len(self._answer.token_ids),
            cached_tokens=min(self._cached_tokens, len(self._prompt)),
        )
        return Finish(reason=piece.reason, usage=usage, phases=self._phases(placement, reports))

    def _phases(self, placement: Placement, reports: LegReports) -> Phases:
        first_s, decode, prefill = self._answer.first_token_s, reports.decode, reports.prefill
        queue_s = compute_s = None
        chunks = 0
        if prefill is not None:
            queue_s, compute_s, chunks = prefill.queue_s, prefill.compute_s, prefill.chunks
        elif placement.prefill is None and decode is not None:
            queue_s, compute_s, chunks = decode.queue_s, decode.prefill_compute_s, decode.prefill_chunks
        return Phases(
            tokenize_s=self._tokenize_s,
            queue_s=self._queue_s,
            prefill_queue_s=queue_s,
            prefill_compute_s=compute_s,
            prefill_chunks=chunks,
            transfer=decode.transfer if decode is not None and placement.prefill is not None else None,
            first_token_s=None if first_s is None else first_s - self._arrived_s,
            time_per_token_s=self._answer.time_per_token_s(),
            total_s=time.monotonic() - self._arrived_s,
            prefill_worker=(placement.prefill or placement.decode).name,
            decode_worker=placement.decode.name,
            local_prefill_reason=placement.local_prefill_reason,
            placements=self._placements,
        )


def _final(error: DiptychError) -> DiptychError:
    """What a client is told when no further placement is tried."""
    return Unavailable(str(error)) if error.retryable else error
