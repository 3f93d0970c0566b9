"""The decode worker's state machine: plain synchronous code, no clock, no network, no torch.

Life of a request here
    WAITING     submitted. Waits for its turn and for blocks: its tokens so far and some room to grow.
    RECEIVING   (hand-off only) holds its blocks; `Reserved` was reported and the shell pulls the KV into them, except
                that of a prefix known here: its blocks are shared and never written.
    COMPUTING   (local prefill only) its pending tokens, those after a known prefix, are computed in chunks under a
                token budget, in the same steps as everybody's decoding.
    RUNNING     one token in every step that is its turn, reported as `Tokens`.
                Received or computed, a block is registered for others as soon as it is full.
    LEAVING     its KV is copied to the host (`Copy`); afterwards its blocks are free and it is
    SWAPPED     until there is room for it again, ahead of its turn if that can be, when it is
    RETURNING   copied back, and goes on where it was.
    ended       `Finished` or `Failed` was reported, its blocks are free, it is forgotten.
    DRAINING    cancelled or failed while RECEIVING: late bytes may still arrive, so the blocks stay until `Drained`.
    ENDING      cancelled while LEAVING or RETURNING: the copy goes on, so the blocks, here and on the host, stay until
                its `Copied`.

    Between two steps, and only there, the policy says whose turn it is (`order`, `batch`), and the swapper who has
    to give way for it (`memory`): swapped out, or, where that costs more, back to WAITING with everything it has as
    tokens to compute again. It never waits for KV that was consumed: the hand-off is used once. `Received` carries the
    first token; if that ended the request, nothing is decoded.
    Who had to give way once keeps the memory that it begins to use again until it has got a token for it, so that
    giving way and coming back do not alternate for ever. One request always fits into the pool; when nobody can run and
    nothing is under way that would change it, all others give way to the first in order. So every step with runnable
    work brings somebody on.
    Cancel, in any stage, frees within a step, or with the end of the copy that is under way. Deadlines and the loss of
    the peer reach this core as `Cancel` or `TransferFailed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.decode.batch import Batch
from services.decode.memory import Memory
from services.decode.messages import (
    Began,
    Cancel,
    Command,
    Copied,
    Drained,
    Event,
    Failed,
    Finished,
    Received,
    Submit,
    Tokens,
    TransferFailed,
)
from services.decode.order import Order
from services.decode.requests import ENDED, MOVING, RESIDENT, Request, Stage
from services.engine.sequence import FinishReason, blocks_needed, finish_reason
from services.errors import DiptychError, NotAdmitted
from services.latency import Latency
from services.schedule.policy import Policy
from services.schedule.weights import Weights
from services.worker.turns import described, mode_of
from services.worker.work import Computed, Load, Work


@dataclass(kw_only=True)
class DecodeCore:
    """All requests of one decode worker.

    `max_batch` bounds the requests of a step, `chunk_tokens` the prompt tokens computed in it beside them. `latency`
    says what the worker knows of its speed by now.
    """

    memory: Memory
    policy: Policy
    chunk_tokens: int
    max_batch: int
    latency: Callable[[], Latency] = Latency
    weights: Weights = field(default_factory=Weights)
    _begin_s: float = field(default=0.0, init=False)  # of the step that is being computed

    def __post_init__(self) -> None:
        """The requests are the memory's."""
        self._requests = self.memory.requests
        self._events = self.memory.events
        self._order = Order(policy=self.policy, requests=self._requests, latency=self.latency, weights=self.weights)
        self._batch = Batch(
            memory=self.memory, order=self._order, chunk_tokens=self.chunk_tokens, max_batch=self.max_batch
        )

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
            case Copied():
                self._copied(command)

    def plan(self, now_s: float) -> Sequence[Work]:
        """Moves what has to move, then one token for everybody whose turn it is, and chunks of prompts beside them."""
        self._begin_s = now_s
        self.memory.swapper.prefill = self.latency().prefill
        if not self._requests or self.memory.waits:
            return []
        work = self._work_of(self._batch.next(now_s))
        if work:
            self._order.begin([self._requests[item.key] for item in work], now_s)
        return work

    def complete(self, work: Sequence[Work], results: Sequence[Computed], now_s: float) -> None:
        """See StepCore."""
        self._measure(work, now_s)
        self._order.ran(work, now_s - self._begin_s, now_s)
        for item, result in zip(work, results, strict=True):
            request = self._requests[item.key]
            request.sequence.advance(len(item.slice.token_ids))
            self.memory.register(request)
            if request.stage is Stage.COMPUTING and request.generated == 0:
                request.chunks += 1
            request.prompt_logprobs += result.prompt_logprobs
            if result.token_id is None:
                self._requests.pin(request)
                self._requests.recount(request)
                continue
            request.ready_s = request.ready_s or now_s
            if request.stage is Stage.COMPUTING:
                self._requests.move(request, Stage.RUNNING)
            self._add_token(request, result, now_s)

    def fail(self, work: Sequence[Work], error: Exception) -> None:
        """See StepCore. A later request must not find in the cache what this one failed with."""
        self.memory.doubt()
        for item in work:
            self._fail(self._requests[item.key], DiptychError(f"decode failed: {error}"))

    def take_events(self) -> list[Event]:
        """See StepCore."""
        events = list(self._events)
        self._events.clear()
        return events

    def load(self) -> Load:
        """See StepCore."""
        count = self._requests.count
        swapped = count(Stage.LEAVING, Stage.SWAPPED, Stage.RETURNING)
        return Load(
            blocks=self.memory.counts(),
            queued_tokens=self._requests.queued_tokens,
            running=count(*RESIDENT),
            waiting=count(Stage.WAITING, Stage.RECEIVING) + swapped,
            swapped=swapped,
            levels=tuple(self.policy.levels()),
            schedule=described(self.policy),
            host_blocks=self.memory.host.counts().total if mode_of(self.policy) != "fcfs" else 0,
        )

    def check(self) -> None:
        """See StepCore."""
        self.memory.check()

    def _submit(self, submit: Submit, now_s: float) -> None:
        most = len(submit.token_ids) + submit.max_new_tokens
        if blocks_needed(most, self.memory.block_tokens) > self.memory.total:
            limit = self.memory.total * self.memory.block_tokens
            error = NotAdmitted(f"prompt and answer of up to {most} tokens exceed this worker's KV memory of {limit}")
            self._events.append(Failed(key=submit.key, error=error))
            return
        self._order.arrive(self._requests.add(submit, now_s), now_s)

    def _cancel(self, key: str) -> None:
        request = self._requests.get(key)
        if request is not None and request.stage not in ENDED:
            self._end(request)

    def _received(self, received: Received, now_s: float) -> None:
        request = self._requests[received.key]
        if request.stage is Stage.DRAINING:  # cancelled while the last piece was arriving
            self.memory.forget(request)
            return
        request.sequence.advance(request.sequence.pending)
        if received.finish is None:  # else the sender may have left out what nobody will read
            self.memory.register(request)
        request.ready_s = now_s
        request.local = True
        self._requests.move(request, Stage.RUNNING)
        self._add_token(request, Computed(token_id=received.first_token_id), now_s, finish=received.finish)

    def _transfer_failed(self, key: str, error: DiptychError) -> None:
        request = self._requests.get(key)
        if request is not None and not request.local and request.stage not in ENDED:
            self._fail(request, error)

    def _drained(self, key: str) -> None:
        request = self._requests.get(key)
        if request is not None and request.stage is Stage.DRAINING:
            self.memory.forget(request)

    def _copied(self, copied: Copied) -> None:
        request = self._requests[copied.key]
        if copied.error is None:
            self.memory.copied(request, copied)
            return
        if request.stage not in ENDED:
            self._events.append(Failed(key=request.key, error=copied.error))
            self._order.finish(request, completed=False)
        self.memory.lost(request)

    def _work_of(self, step: Sequence[Request]) -> list[Work]:
        """One token of each that decodes, then chunks within the budget."""
        work = [self._work(request, 1) for request in step if request.stage is Stage.RUNNING]
        budget = self.chunk_tokens
        for request in step:
            if request.stage is Stage.COMPUTING and budget:
                work.append(self._work(request, budget))
                budget -= len(work[-1].slice.token_ids)
        return work

    def _work(self, request: Request, limit_tokens: int) -> Work:
        submit = request.submit
        return Work.of(
            submit.key,
            request.sequence.next_slice(limit_tokens),
            submit.sampling,
            request.sequence.token_ids,
            prompt_tokens=submit.prompt_tokens or len(submit.token_ids),
            wants_prompt_logprobs=request.whole,
        )

    def _measure(self, work: Sequence[Work], now_s: float) -> None:
        """What copies beside a step of rows alone delay it by."""
        copying_bytes, fit = self.memory.copying_bytes, self.latency().step
        if not copying_bytes or fit is None or any(len(item.slice.token_ids) > 1 for item in work):
            return
        seconds = now_s - self._begin_s
        context = sum([item.slice.end for item in work])
        bandwidth = self.memory.swapper.bandwidth
        beside_bytes = min(copying_bytes, bandwidth.bytes_per_s * seconds)
        bandwidth.delayed(beside_bytes, seconds - fit.step_s(context_tokens=context, batch=len(work)))

    def _add_token(
        self, request: Request, result: Computed, now_s: float, *, finish: FinishReason | None = None
    ) -> None:
        submit, token = request.submit, result.token_id
        assert token is not None, "only sampled tokens are added"
        request.sequence.append(token)
        self._requests.unpin(request)
        self._requests.recount(request)
        if request.generated == 0:
            self._begin(request)
        logprobs = () if submit.sampling.logprobs is None else (result.logprobs,)
        self._events.append(Tokens(key=submit.key, offset=request.generated, token_ids=(token,), logprobs=logprobs))
        request.generated += 1
        reason = finish or finish_reason(token, request.generated, submit.max_new_tokens, submit.stop_token_ids)
        if reason:
            self._finish(request, reason, now_s)

    def _begin(self, request: Request) -> None:
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

    def _finish(self, request: Request, reason: FinishReason, now_s: float) -> None:
        finished = Finished(
            key=request.key, reason=reason, ready_s=request.ready_s, ended_s=now_s, turns=request.turns()
        )
        self._events.append(finished)
        self._order.finish(request, completed=True)
        self.memory.forget(request)

    def _fail(self, request: Request, error: DiptychError) -> None:
        self._events.append(Failed(key=request.key, error=error))
        self._end(request)

    def _end(self, request: Request) -> None:
        """It is over before its end; its blocks stay where somebody still touches them."""
        self._order.finish(request, completed=False)
        if request.stage is Stage.RECEIVING or request.stage in MOVING:
            self.memory.drain(request)
        else:
            self.memory.forget(request)
