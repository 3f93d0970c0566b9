"""A request's life at the gateway.

1. Validate, render, tokenize: everything that can be refused is refused here.
2. Run its answers (`attempts`): place, run both legs (`legs`), hand every new piece to the client's stream. A leg that
   is lost is placed again, away from the worker that failed, and goes on after the last token (`Recovery`).
3. The end, whichever it is (answers, error, cancel, deadline): the scheduler and the workers are told.
An error of one answer ends them all. Cancel: the task of the request is cancelled, with it every call it made.
Deadline: the same, with DeadlineExceeded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from opentelemetry.trace import Span

from services.engine.sampling_spec import TokenLogprobs
from services.errors import DeadlineExceeded
from services.gateway.answer import LoggedToken, Piece
from services.gateway.attempts import Asked, Attempts
from services.gateway.echo import tokenize
from services.gateway.mesh import Mesh
from services.gateway.placement import Finish, Placement, Usage
from services.gateway.request import GenerationRequest, check_length, check_prompt_logprobs, fit, validate
from services.rpc.options import MAX_MESSAGE_BYTES
from services.telemetry import context, spans
from services.telemetry.tracing import tracer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A part of the answer `index`, see Piece; `finish` on the last one of each answer."""

    text: str
    token_ids: Sequence[int]
    index: int = 0
    finish: Finish | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    shown: Sequence[LoggedToken] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()

    @classmethod
    def of(cls, piece: Piece, index: int, finish: Finish | None) -> Event:
        """The event that a piece is."""
        return cls(
            text=piece.text,
            token_ids=piece.token_ids,
            index=index,
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
        self._first_noted = False
        self._finished = 0  # answers

    async def run(self) -> None:
        """Lives it. Raises a DiptychError for everything that is not an answer."""
        context.request_id.set(self._id)
        with tracer().start_as_current_span(spans.GATEWAY_REQUEST) as span:
            span.set_attributes({"diptych.request_id": self._id, "diptych.model": self._mesh.model.name})
            with self._mesh.metrics.running():
                self._tell(await self._within_deadline(), span)

    def _tell(self, finishes: Sequence[Finish], span: Span) -> None:
        usage, client_id = Usage.of_all(finish.usage for finish in finishes), self._request.client_request_id
        log.info(
            "%s after %d + %d tokens, %d answers, at most %d placements%s",
            finishes[0].reason,
            usage.prompt_tokens,
            usage.completion_tokens,
            len(finishes),
            max(finish.phases.placements for finish in finishes),
            f", client's id {client_id!r}" if client_id else "",
        )
        span.set_attributes(
            {
                "diptych.answers": len(finishes),
                "diptych.prompt_tokens": usage.prompt_tokens,
                "diptych.completion_tokens": usage.completion_tokens,
                "diptych.finish_reason": finishes[0].reason,
            }
        )

    async def _within_deadline(self) -> Sequence[Finish]:
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

    async def _live(self) -> Sequence[Finish]:
        asked = await self._tokenize()
        answers = [
            Attempts(self._mesh, asked, index, partial(self._pass_on, index)) for index in range(self._request.answers)
        ]
        try:
            return await _all_of(answers)
        finally:
            # Not before all have ended: the first placement is counted for all of them.
            for answer in answers:
                if answer.placed:
                    self._mesh.closing.finish(answer.id)

    async def _tokenize(self) -> Asked:
        model, request = self._mesh.model, self._request
        validate(request, model=model.name, vocab=model.vocab)
        longest_token = self._mesh.tokenizer.longest_token
        check_length(request.prompt, longest_token=longest_token, context_tokens=model.context_tokens)
        with tracer().start_as_current_span(spans.GATEWAY_TOKENIZE):
            # A thread: a long prompt would hold up everybody else's tokens.
            prompt, echo = await asyncio.to_thread(tokenize, self._mesh.tokenizer, request)
        tokenize_s = time.monotonic() - self._arrived_s
        check_prompt_logprobs(request, len(prompt), max_bytes=MAX_MESSAGE_BYTES)
        return Asked(
            id=self._id,
            request=request,
            prompt=prompt,
            echo=echo,
            max_new_tokens=fit(request.prompt, len(prompt), request.max_tokens, context_tokens=model.context_tokens),
            end_token_ids=() if request.ignore_eos else model.eos_token_ids,
            arrived_s=self._arrived_s,
            deadline_s=self._deadline_s,
            tokenize_s=tokenize_s,
        )

    def _pass_on(self, index: int, piece: Piece, finish: Finish | None) -> None:
        if not self._first_noted:
            self._first_noted = True
            self._mesh.metrics.first_token(time.monotonic() - self._arrived_s)
        if finish is not None:
            self._finished += 1
            self._mesh.metrics.answered(finish)
            if self._finished == self._request.answers:
                self._mesh.metrics.finished(finish)
        self._emit(Event.of(piece, index, finish))


async def _all_of(answers: Sequence[Attempts]) -> Sequence[Finish]:
    """Runs the answers of one prompt. One at a time, until one has brought the prompt's KV; then all others there."""
    home: Placement | None = None
    running: list[asyncio.Task[Finish]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for begun, answer in enumerate(answers):
                running.append(group.create_task(answer.run(home, answers=len(answers) - begun)))
                home = home or await answer.settled()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]
