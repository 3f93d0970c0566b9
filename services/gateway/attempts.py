"""One answer of a request: placed, run, and placed again as long as its legs are lost and it may be.

Several answers of one prompt share its KV:
1. The first one is placed for all of them and runs both legs, as an answer alone does.
2. Once decode has its KV (`settled`), the others start on that decode worker, without a prefill leg. Its prefix cache
   gives them the full blocks; they compute the rest of the prompt, at most a block, and draw their own first token.
3. An answer that ends before decode has the KV (with its first token, say) leaves the next one to bring it: prefill
   knows the prompt by then.
4. From there on each is on its own. One that is lost is placed again alone, after its own tokens.
Without a prefix cache the others compute the prompt: slower, and the same tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from services.engine.sampling_spec import TokenLogprobs
from services.errors import DiptychError, Unavailable
from services.gateway.answer import Answer, Piece
from services.gateway.echo import Echo
from services.gateway.legs import Legs
from services.gateway.mesh import Mesh
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
from services.gateway.request import GenerationRequest, answer_seed

log = logging.getLogger(__name__)

SHARED_REASON = "the prompt's KV came with another answer"


@dataclass(kw_only=True, slots=True)
class Asked:
    """What the answers of a request have in common. Times are monotonic seconds.

    The request's seed is set. `prompt_logprobs`: once an answer has brought them, and only where they were asked for.
    """

    id: str
    request: GenerationRequest
    prompt: Sequence[int]
    echo: Echo | None
    max_new_tokens: int
    end_token_ids: Sequence[int]
    arrived_s: float
    deadline_s: float
    tokenize_s: float
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class Attempts:
    """The answer `index` of a request. `emit` gets every piece, and the finish with the last one."""

    def __init__(self, mesh: Mesh, asked: Asked, index: int, emit: Callable[[Piece, Finish | None], None]) -> None:
        self._mesh, self._asked, self._emit = mesh, asked, emit
        self._first_answer = index == 0
        self.id = asked.id if index == 0 else f"{asked.id}-{index}"
        sampling = asked.request.sampling
        assert sampling.seed is not None, "drawn when the request began"
        self._sampling = replace(sampling, seed=answer_seed(sampling.seed, index))
        self._echo = asked.echo  # until it is shown, with the first piece
        self._answer = Answer(
            decode=mesh.tokenizer.decode,
            stops=asked.request.stop,
            end_token_ids=frozenset(asked.end_token_ids),
            clock=time.monotonic,
            echo_chars=0 if asked.echo is None else len(asked.echo.text),
        )
        self.placed = 0  # times that the scheduler was asked
        self._counts_for = 1  # answers that a placement is for
        self._runs = 0
        self._queue_s = 0.0
        self._cached_tokens = 0
        self._settled = asyncio.Event()
        self._home: Placement | None = None

    async def run(self, home: Placement | None, *, answers: int) -> Finish:
        """Runs it to its end: first where the prompt's KV is (`home`), or else where it is placed for `answers`.

        Raises a DiptychError for everything that is not an answer.
        """
        self._counts_for = answers if home is None else 1
        piece, placement, legs = await self._until_answered(home)
        piece = self._with_prompt(piece)
        finish = self._finish(piece, placement, legs.reports)
        self._emit(piece, finish)
        self._settle(_without_prefill(placement) if legs.kv_arrived else None)
        return finish

    async def settled(self) -> Placement | None:
        """Waits until a decode worker has the prompt's KV: where others can start. None: it has ended before that."""
        await self._settled.wait()
        return self._home

    def _settle(self, home: Placement | None) -> None:
        if not self._settled.is_set():
            self._home = home
            self._counts_for = 1
            self._settled.set()

    async def _until_answered(self, home: Placement | None) -> tuple[Piece, Placement, Legs]:
        recovery = Recovery()
        while True:
            placement, home = home or await self._place(recovery.avoid), None
            self._runs += 1
            self._queue_s += placement.queue_s
            settle = partial(self._settle, _without_prefill(placement))
            legs = Legs(self._mesh.workers, placement, self._answer, self._pass_on, settle)
            try:
                piece = await legs.run(self._work(), self._asked.deadline_s)
                return piece, placement, legs
            except LegFailed as failed:
                if not recovery.again(failed, started=bool(self._answer.token_ids)):
                    raise _final(failed.error) from failed
                log.warning("placement %d of %s was lost, placing again: %s", self._runs, self.id, failed)
                self._mesh.metrics.placement_lost()
            finally:
                self._note(legs, placement)

    async def _place(self, avoid: Sequence[Worker]) -> Placement:
        self.placed += 1
        request, done = self._asked.request, len(self._answer.token_ids)
        wish = PlaceWish(
            request_id=self.id,
            attempt=self.placed,
            model=self._mesh.model.name,
            prompt_tokens=len(self._asked.prompt) + done,
            max_new_tokens=self._asked.max_new_tokens - done,
            tenant=request.tenant,
            priority=request.priority,
            slo=request.slo,
            avoid=avoid,
            answers=self._counts_for,
        )
        return await self._mesh.scheduler.place(wish, self._asked.deadline_s)

    def _note(self, legs: Legs, placement: Placement) -> None:
        """A placement is over, well or not: what it said, and what nobody else will clean up."""
        # Where the prompt was computed; a later placement's prompt holds tokens that are not the client's.
        computed = legs.reports.prefill if placement.prefill is not None else legs.reports.decode
        if self._runs == 1 and computed is not None:
            self._cached_tokens = computed.cached_tokens
        if not legs.handed_over and legs.reports.prefill is not None and legs.reports.prefill.reason is None:
            # Prefill has answered and keeps the KV; a decode leg that was ended early may never come for it.
            self._mesh.closing.release(placement)

    def _pass_on(self, piece: Piece) -> None:
        self._emit(self._with_prompt(piece), None)

    def _with_prompt(self, piece: Piece) -> Piece:
        """The piece; the first one behind the echo of the prompt, where one is wanted."""
        self._asked.prompt_logprobs = piece.prompt_logprobs or self._asked.prompt_logprobs
        echo, self._echo = self._echo, None
        return piece if echo is None else echo.lead(replace(piece, prompt_logprobs=self._asked.prompt_logprobs))

    def _work(self) -> LegWork:
        asked, done = self._asked, self._answer.token_ids
        return LegWork(
            request_id=self.id,
            token_ids=[*asked.prompt, *done],
            prompt_tokens=len(asked.prompt),
            # Once there are tokens, of whichever answer, the client has those of the prompt.
            sampling=replace(self._sampling, prompt_logprobs=None) if done or asked.prompt_logprobs else self._sampling,
            max_new_tokens=asked.max_new_tokens - len(done),
            stop_token_ids=asked.end_token_ids,
            tenant=asked.request.tenant,
            priority=asked.request.priority,
        )

    def _finish(self, piece: Piece, placement: Placement, reports: LegReports) -> Finish:
        if piece.reason is None:
            raise DiptychError("an answer ended without a reason")
        prompt_tokens = len(self._asked.prompt) if self._first_answer else 0
        usage = Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=0 if self._asked.request.echo == "instead" else len(self._answer.token_ids),
            cached_tokens=min(self._cached_tokens, prompt_tokens),
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
            tokenize_s=self._asked.tokenize_s,
            queue_s=self._queue_s,
            prefill_queue_s=queue_s,
            prefill_compute_s=compute_s,
            prefill_chunks=chunks,
            transfer=decode.transfer if decode is not None and placement.prefill is not None else None,
            first_token_s=None if first_s is None else first_s - self._asked.arrived_s,
            time_per_token_s=self._answer.time_per_token_s(),
            total_s=time.monotonic() - self._asked.arrived_s,
            prefill_worker=(placement.prefill or placement.decode).name,
            decode_worker=placement.decode.name,
            local_prefill_reason=placement.local_prefill_reason,
            placements=self._runs,
            turns=reports.turns,
        )


def _without_prefill(placement: Placement) -> Placement:
    """The placement for an answer that starts where another one has brought the prompt's KV."""
    return replace(placement, prefill=None, transfer_id="", local_prefill_reason=SHARED_REASON)


def _final(error: DiptychError) -> DiptychError:
    """What a client is told when no further placement is tried."""
    return Unavailable(str(error)) if error.retryable else error
