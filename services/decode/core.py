"""The decode worker's state machine: plain synchronous code, no clock, no network, no torch.

Life of a request here
    WAITING     submitted; first come, first served. Waits for blocks: its tokens so far and some room to grow.
    RECEIVING   (hand-off only) holds its blocks; `Reserved` was reported and the shell pulls the KV into them, except
                that of a prefix known here: its blocks are shared and never written.
    COMPUTING   (local prefill only) its pending tokens, those after a known prefix, are computed in chunks under a
                token budget, in the same steps as everybody's decoding.
    RUNNING     one token per step, reported as `Tokens`.
                Received or computed, a block is registered for others as soon as it is full.
    ended       `Finished` or `Failed` was reported, its blocks are free, it is forgotten.
    DRAINING    cancelled or failed while RECEIVING: late bytes may still arrive, so the blocks stay until `Drained`.

    The hand-off is used once. `Received` carries the first token; if that ended the request, nothing is decoded.
    Out of blocks: the youngest request gives its blocks up and goes back to WAITING with everything it has as tokens to
    compute again (it never waits for KV that was consumed). The oldest of those that run gives way last, and one
    request always fits into the pool, so every step with runnable work yields a token.
    Cancel, in any stage, frees within a step. Deadlines and the loss of the peer reach this core as `Cancel` or
    `TransferFailed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.blocks import BlockPool, BlockState
from services.decode.messages import (
    Began,
    Cancel,
    Command,
    Drained,
    Event,
    Failed,
    Finished,
    Received,
    Reserved,
    Submit,
    Tokens,
    TransferFailed,
)
from services.engine.prefix import PrefixCache
from services.engine.sampling_spec import TokenLogprobs
from services.engine.sequence import FinishReason, TokenSequence, blocks_needed, finish_reason
from services.errors import DiptychError, NotAdmitted
from services.worker.work import Computed, Load, Work

GROWTH_TOKENS = 64
"""Room reserved for new tokens at admission and when it is used up, so that a request seldom runs out of blocks."""


class Stage(Enum):
    """Where a request is; see the module's text."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    COMPUTING = "computing"
    RUNNING = "running"
    DRAINING = "draining"


@dataclass(kw_only=True, slots=True)
class _Request:
    submit: Submit
    sequence: TokenSequence
    submitted_s: float
    local: bool  # how its KV comes about next: a hand-off is used once, afterwards it is always local
    stage: Stage = Stage.WAITING
    generated: int = 0
    admitted_s: float = 0.0
    ready_s: float = 0.0
    cached_tokens: int = 0  # of the prompt, when it was first admitted
    chunks: int = 0
    recomputed: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(kw_only=True)
class DecodeCore:
    """All requests of one decode worker, in order of arrival.

    `max_batch` bounds the requests of a step, `chunk_tokens` the prompt tokens computed in it beside them. `prefix` is
    over the same pool.
    """

    pool: BlockPool
    prefix: PrefixCache
    block_tokens: int
    chunk_tokens: int
    max_batch: int
    _requests: dict[str, _Request] = field(default_factory=dict, init=False)
    _events: list[Event] = field(default_factory=list, init=False)

    def apply(self, command: Command, now_s: float) -> None:
        """See StepCore."""
        match command:
            case Submit():
                self._submit(command, now_s)
            case Cancel(key):
                self._cancel(key)
            case Received():
                self._received(command, now_s)
            case TransferFailed(key, error):
                self._transfer_failed(key, error)
            case Drained(key):
                self._drained(key)

    def plan(self, now_s: float) -> Sequence[Work]:
        """Admits what fits, then one token for every running request and chunks of prompts beside them."""
        self._admit(now_s)
        running = [request for request in self._requests.values() if request.stage is Stage.RUNNING][: self.max_batch]
        self._make_room(running)
        work = [self._work(request, 1) for request in running if request.stage is Stage.RUNNING]
        budget = self.chunk_tokens
        for request in self._requests.values():
            if budget == 0 or len(work) == self.max_batch:
                break
            if request.stage is Stage.COMPUTING:
                work.append(self._work(request, budget))
                budget -= len(work[-1].slice.token_ids)
        return work

    def complete(self, work: Sequence[Work], results: Sequence[Computed], now_s: float) -> None:
        """See StepCore."""
        for item, result in zip(work, results, strict=True):
            request = self._requests[item.key]
            request.sequence.advance(len(item.slice.token_ids))
            self.prefix.register(item.key, request.sequence)
            if request.stage is Stage.COMPUTING and request.generated == 0:
                request.chunks += 1
            request.prompt_logprobs += result.prompt_logprobs
            if result.token_id is None:
                continue
            request.ready_s = request.ready_s or now_s
            request.stage = Stage.RUNNING
            self._add_token(request, result, now_s)

    def fail(self, work: Sequence[Work], error: Exception) -> None:
        """See StepCore. A later request must not find in the cache what this one failed with."""
        self.prefix.doubt()
        for item in work:
            self._fail(item.key, DiptychError(f"decode failed: {error}"))

    def take_events(self) -> list[Event]:
        """See StepCore."""
        events, self._events = self._events, []
        return events

    def load(self) -> Load:
        """See StepCore."""
        requests = self._requests.values()
        computing = (r.sequence.pending for r in requests if r.local and r.stage in (Stage.WAITING, Stage.COMPUTING))
        return Load(
            blocks=self.pool.counts(),
            queued_tokens=sum(computing),
            running=sum(r.stage in (Stage.RUNNING, Stage.COMPUTING) for r in requests),
            waiting=sum(r.stage in (Stage.WAITING, Stage.RECEIVING) for r in requests),
        )

    def check(self) -> None:
        """See StepCore."""
        self.pool.check()

    def _submit(self, submit: Submit, now_s: float) -> None:
        most = len(submit.token_ids) + submit.max_new_tokens
        if blocks_needed(most, self.block_tokens) > (total := self.pool.counts().total):
            limit = total * self.block_tokens
            error = NotAdmitted(f"prompt and answer of up to {most} tokens exceed this worker's KV memory of {limit}")
            self._events.append(Failed(key=submit.key, error=error))
            return
        sequence = TokenSequence(token_ids=list(submit.token_ids))
        self._requests[submit.key] = _Request(submit=submit, sequence=sequence, submitted_s=now_s, local=submit.local)

    def _cancel(self, key: str) -> None:
        request = self._requests.get(key)
        if request is None or request.stage is Stage.DRAINING:
            return
        if request.stage is Stage.RECEIVING:
            self._drain(request)
        else:
            self._forget(key)

    def _received(self, received: Received, now_s: float) -> None:
        request = self._requests[received.key]
        if request.stage is Stage.DRAINING:  # cancelled while the last piece was arriving
            self._forget(received.key)
            return
        request.sequence.advance(request.sequence.pending)
        if received.finish is None:  # else the sender may have left out what nobody will read
            self.prefix.register(received.key, request.sequence)
        request.stage, request.ready_s = Stage.RUNNING, now_s
        request.local = True
        self._add_token(request, Computed(token_id=received.first_token_id), now_s, finish=received.finish)

    def _transfer_failed(self, key: str, error: DiptychError) -> None:
        request = self._requests.get(key)
        if request is None or request.stage is Stage.DRAINING:
            return
        if request.stage is Stage.WAITING:  # never reserved: nothing to drain
            self._fail(key, error)
            return
        self._drain(request)
        self._events.append(Failed(key=key, error=error))

    def _drained(self, key: str) -> None:
        request = self._requests.get(key)
        if request is not None and request.stage is Stage.DRAINING:
            self._forget(key)

    def _admit(self, now_s: float) -> None:
        for request in self._requests.values():
            if request.stage is not Stage.WAITING:
                continue
            submit = request.submit
            cached_tokens = self.prefix.admit(
                submit.key,
                request.sequence,
                room_tokens=_room_tokens(request),
                whole=submit.wants_prompt_logprobs and request.generated == 0,
            )
            if cached_tokens is None:
                return  # first come, first served: nobody passes
            if request.recomputed == 0:
                request.admitted_s, request.cached_tokens = now_s, cached_tokens
            if request.local:
                request.stage = Stage.COMPUTING
            else:
                request.stage = Stage.RECEIVING
                self._events.append(self._reserved(request))

    def _reserved(self, request: _Request) -> Reserved:
        prompt_blocks = blocks_needed(len(request.sequence.token_ids), self.block_tokens)
        blocks = tuple(request.sequence.blocks[:prompt_blocks])
        return Reserved(key=request.submit.key, blocks=blocks, skip_tokens=request.sequence.computed)

    def _make_room(self, running: Sequence[_Request]) -> None:
        """Gives every running request a block for its next token, oldest first; the youngest give theirs up for it.

        Where there is enough for all, it gets some room to grow with it: neighbours, while single blocks would scatter.
        """
        for request in running:
            while request.stage is Stage.RUNNING and request.sequence.blocks_missing(self.block_tokens):
                room_blocks = request.sequence.blocks_missing(self.block_tokens, room_tokens=_room_tokens(request))
                if self.pool.can_allocate(room_blocks * len(running)):
                    request.sequence.add_blocks(self.pool.extend(request.submit.key, room_blocks))
                elif self.pool.can_allocate(1):
                    request.sequence.add_blocks(self.pool.extend(request.submit.key, 1))
                else:
                    self._give_up_blocks(self._youngest())

    def _youngest(self) -> _Request:
        return next(r for r in reversed(self._requests.values()) if r.stage in (Stage.RUNNING, Stage.COMPUTING))

    def _give_up_blocks(self, request: _Request) -> None:
        self.pool.free(request.submit.key)
        request.sequence = request.sequence.without_blocks()
        request.stage = Stage.WAITING
        request.prompt_logprobs.clear()  # computed again, if they were not reported yet
        request.recomputed += 1

    def _work(self, request: _Request, limit_tokens: int) -> Work:
        submit = request.submit
        return Work.of(
            submit.key,
            request.sequence.next_slice(limit_tokens),
            submit.sampling,
            request.sequence.token_ids,
            prompt_tokens=submit.prompt_tokens or len(submit.token_ids),
            wants_prompt_logprobs=submit.wants_prompt_logprobs and request.generated == 0,
        )

    def _add_token(
        self, request: _Request, result: Computed, now_s: float, *, finish: FinishReason | None = None
    ) -> None:
        submit, token = request.submit, result.token_id
        assert token is not None, "only sampled tokens are added"
        request.sequence.append(token)
        if request.generated == 0:
            self._begin(request)
        logprobs = () if submit.sampling.logprobs is None else (result.logprobs,)
        self._events.append(Tokens(key=submit.key, offset=request.generated, token_ids=(token,), logprobs=logprobs))
        request.generated += 1
        reason = finish or finish_reason(token, request.generated, submit.max_new_tokens, submit.stop_token_ids)
        if reason:
            self._finish(request, reason, now_s)

    def _begin(self, request: _Request) -> None:
        began = Began(
            key=request.submit.key,
            submitted_s=request.submitted_s,
            admitted_s=request.admitted_s,
            ready_s=request.ready_s,
            cached_tokens=request.cached_tokens,
            chunks=request.chunks,
            prompt_logprobs=tuple(request.prompt_logprobs),
        )
        self._events.append(began)

    def _finish(self, request: _Request, reason: FinishReason, now_s: float) -> None:
        finished = Finished(
            key=request.submit.key,
            reason=reason,
            ready_s=request.ready_s,
            ended_s=now_s,
            recomputed=request.recomputed,
        )
        self._events.append(finished)
        self._forget(request.submit.key)

    def _fail(self, key: str, error: DiptychError) -> None:
        self._events.append(Failed(key=key, error=error))
        self._forget(key)

    def _drain(self, request: _Request) -> None:
        request.stage = Stage.DRAINING
        self.pool.drain(request.submit.key)

    def _forget(self, key: str) -> None:
        del self._requests[key]
        match self.pool.state(key):
            case None:
                pass  # it was waiting
            case BlockState.DRAINING:
                self.pool.drained(key)
            case _:
                self.pool.free(key)


def _room_tokens(request: _Request) -> int:
    return min(request.submit.max_new_tokens - request.generated, GROWTH_TOKENS)
