"""The prefill worker's state machine: plain synchronous code, no clock, no network, no torch.

Life of a request here
    WAITING    submitted. Waits for its turn, and until the pool has blocks for its whole prompt; nobody passes one that
               waits for blocks. KV that nobody has pulled yet occupies blocks, so a slow receiver holds admission back
               instead of being overrun.
    COMPUTING  holds its blocks (`Admitted`), those of a known prefix shared with others and computed already; the rest
               is computed in chunks under a token budget shared with the others (`Progress` after each chunk, and for
               the cached tokens at once, so that finished parts can leave). Full blocks are registered for others.
               Whose chunks fill a step is the policy's choice, so that short prompts pass long ones between chunks.
    COMPUTED   its first token was sampled (`FirstToken`); the blocks are leased to the transfer.
    then `Released` (acknowledged, expired, given up): blocks are free, the request is forgotten.

    On cancel: WAITING forgets it at once. COMPUTING stops computing and reports `Failed`; the blocks stay until the
    transfer says `Released`, because a piece may still be leaving from them. A failed computation goes the same way.
    Deadlines and peer death reach this core as `Cancel` or `Released`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.blocks import BlockPool, BlockState
from services.engine.prefix import PrefixCache
from services.engine.sampling_spec import TokenLogprobs
from services.engine.sequence import TokenSequence, blocks_needed, finish_reason
from services.errors import Cancelled, DiptychError, HandOffLost, NotAdmitted
from services.latency import Latency
from services.prefill.messages import Admitted, Cancel, Command, Event, Failed, FirstToken, Progress, Released, Submit
from services.schedule.policy import Job, Policy
from services.schedule.weights import Weights
from services.worker.turns import chunk_s, described, prompt_s
from services.worker.work import Computed, Load, Work

log = logging.getLogger(__name__)


class Stage(Enum):
    """Where a request is; see the module's text."""

    WAITING = "waiting"
    COMPUTING = "computing"
    COMPUTED = "computed"
    ENDED = "ended"  # failed or cancelled; waits for Released


@dataclass(kw_only=True, slots=True)
class _Prompt:
    submit: Submit
    submitted_s: float
    sequence: TokenSequence
    stage: Stage = Stage.WAITING
    admitted_s: float = 0.0
    cached_tokens: int = 0
    chunks: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def work(self, limit_tokens: int) -> Work:
        """Its next slice."""
        submit, tokens = self.submit, self.sequence.token_ids
        return Work.of(
            submit.key,
            self.sequence.next_slice(limit_tokens),
            submit.sampling,
            tokens,
            prompt_tokens=submit.prompt_tokens or len(tokens),
            wants_prompt_logprobs=submit.wants_prompt_logprobs,
        )


@dataclass(kw_only=True)
class PrefillCore:
    """All prompts of one prefill worker. `chunk_tokens` bounds the tokens of a step, `max_batch` its requests.

    `prefix` is over the same pool, `latency` says what the worker knows of its speed by now.
    """

    policy: Policy
    pool: BlockPool
    prefix: PrefixCache
    block_tokens: int
    chunk_tokens: int
    max_batch: int
    latency: Callable[[], Latency] = Latency
    weights: Weights = field(default_factory=Weights)
    _prompts: dict[str, _Prompt] = field(default_factory=dict, init=False)  # in order of arrival
    _computing: dict[str, _Prompt] = field(default_factory=dict, init=False)  # those of them, in order of admission
    _begin_s: float = field(default=0.0, init=False)  # of the step that is being computed
    _events: list[Event] = field(default_factory=list, init=False)

    def apply(self, command: Command, now_s: float) -> None:
        """See StepCore."""
        match command:
            case Submit():
                self._submit(command, now_s)
            case Cancel(key):
                self._cancel(key)
            case Released(key):
                self._release(key)

    def plan(self, now_s: float) -> Sequence[Work]:
        """Fills one step with chunks, in order of turns; who is not begun yet needs blocks, and else others go on."""
        self._begin_s = now_s
        chosen = self.policy.choose(self.max_batch, now_s)
        for change in self.policy.take_changes():
            if not change.key:
                log.info("schedule %s: %s", self.policy.name, change.detail)
        work: list[Work] = []
        budget, lacking = self.chunk_tokens, False
        for key in dict.fromkeys((*chosen, *self._computing)):
            if budget == 0 or len(work) == self.max_batch:
                break
            prompt = self._prompts[key]
            if prompt.stage is Stage.WAITING:
                lacking = lacking or not self._admit(prompt, now_s)
            if prompt.stage is Stage.COMPUTING:
                work.append(prompt.work(budget))
                budget -= len(work[-1].slice.token_ids)
        return work

    def complete(self, work: Sequence[Work], results: Sequence[Computed], now_s: float) -> None:
        """See StepCore."""
        self._charge(work, now_s)
        for item, result in zip(work, results, strict=True):
            prompt = self._prompts[item.key]
            prompt.prompt_logprobs += result.prompt_logprobs
            prompt.sequence.advance(len(item.slice.token_ids))
            prompt.chunks += 1
            self.prefix.register(item.key, prompt.sequence)
            self._events.append(Progress(key=item.key, computed_tokens=prompt.sequence.computed))
            if result.token_id is not None:
                self._finish(prompt, result.token_id, result.logprobs, now_s)

    def fail(self, work: Sequence[Work], error: Exception) -> None:
        """See StepCore. A later request must not find in the cache what this one failed with."""
        self.prefix.doubt()
        for item in work:
            self._end(self._prompts[item.key], DiptychError(f"prefill failed: {error}"))

    def take_events(self) -> list[Event]:
        """See StepCore."""
        events, self._events = self._events, []
        return events

    def load(self) -> Load:
        """See StepCore."""
        stages = [prompt.stage for prompt in self._prompts.values()]
        pending = (p.sequence.pending for p in self._prompts.values() if p.stage in (Stage.WAITING, Stage.COMPUTING))
        return Load(
            blocks=self.pool.counts(),
            queued_tokens=sum(pending),
            running=stages.count(Stage.COMPUTING),
            waiting=stages.count(Stage.WAITING),
            levels=tuple(self.policy.levels()),
            schedule=described(self.policy),
        )

    def check(self) -> None:
        """See StepCore."""
        self.pool.check()

    def _submit(self, submit: Submit, now_s: float) -> None:
        needed = blocks_needed(len(submit.token_ids), self.block_tokens)
        total = self.pool.counts().total
        if needed > total:
            limit = total * self.block_tokens
            error = NotAdmitted(
                f"a prompt of {len(submit.token_ids)} tokens exceeds this worker's KV memory of {limit}"
            )
            self._events.append(Failed(key=submit.key, error=error, holds_blocks=False))
            return
        sequence = TokenSequence(token_ids=list(submit.token_ids))
        self._prompts[submit.key] = _Prompt(submit=submit, submitted_s=now_s, sequence=sequence)
        job = Job(
            key=submit.key,
            first_step_s=prompt_s(self.latency().prefill, len(submit.token_ids)),
            tenant=submit.tenant,
            weight=self.weights.of(submit.tenant),
            priority=submit.priority,
            most_tokens=len(submit.token_ids),
        )
        self.policy.arrive(job, now_s)

    def _cancel(self, key: str) -> None:
        prompt = self._prompts.get(key)
        if prompt is None:
            return
        if prompt.stage is Stage.WAITING:
            del self._prompts[key]
            self.policy.finish(key, completed=False)
            self._events.append(Failed(key=key, error=Cancelled("cancelled while waiting"), holds_blocks=False))
        elif prompt.stage is Stage.COMPUTING:
            self._end(prompt, Cancelled("cancelled while computing"))
        # COMPUTED: the hand-off is the transfer's business now; it ends by acknowledgement, release or its limit.

    def _release(self, key: str) -> None:
        prompt = self._prompts.pop(key, None)
        if prompt is None:
            return
        if self.pool.state(key) is BlockState.DRAINING:
            self.pool.drained(key)
        else:
            self.pool.free(key)
        if prompt.stage is Stage.COMPUTING:  # expired or given up by the receiver while we compute
            self._leave_turns(key, completed=False)
            error = HandOffLost("the hand-off ended before the prompt was computed")
            self._events.append(Failed(key=key, error=error, holds_blocks=False))

    def _admit(self, prompt: _Prompt, now_s: float) -> bool:
        """Gives a waiting prompt its blocks, if they are free."""
        key = prompt.submit.key
        cached_tokens = self.prefix.admit(key, prompt.sequence, whole=prompt.submit.wants_prompt_logprobs)
        if cached_tokens is None:
            return False
        prompt.stage, prompt.admitted_s, prompt.cached_tokens = Stage.COMPUTING, now_s, cached_tokens
        self._computing[key] = prompt
        self._events.append(Admitted(key=key, blocks=tuple(prompt.sequence.blocks)))
        if cached_tokens:
            self._events.append(Progress(key=key, computed_tokens=cached_tokens))
        return True

    def _charge(self, work: Sequence[Work], now_s: float) -> None:
        """Tells the policy who ran: the unit of its quanta is a step, which holds a chunk."""
        step_s = now_s - self._begin_s
        self.policy.measured(step_s)
        fit = self.latency().prefill
        for item in work:
            seconds = chunk_s(fit, item.slice, step_s)
            self.policy.computed(item.key, seconds, now_s, tokens=len(item.slice.token_ids))

    def _leave_turns(self, key: str, *, completed: bool) -> None:
        del self._computing[key]
        self.policy.finish(key, completed=completed)

    def _finish(self, prompt: _Prompt, token: int, logprobs: TokenLogprobs | None, now_s: float) -> None:
        submit = prompt.submit
        prompt.stage = Stage.COMPUTED
        self._leave_turns(submit.key, completed=True)
        self.pool.lease(submit.key)
        finish = finish_reason(token, 1, submit.max_new_tokens, submit.stop_token_ids)
        self._events.append(
            FirstToken(
                key=submit.key,
                token_id=token,
                finish=finish,
                submitted_s=prompt.submitted_s,
                admitted_s=prompt.admitted_s,
                computed_s=now_s,
                cached_tokens=prompt.cached_tokens,
                chunks=prompt.chunks,
                logprobs=logprobs,
                prompt_logprobs=tuple(prompt.prompt_logprobs),
            )
        )

    def _end(self, prompt: _Prompt, error: DiptychError) -> None:
        prompt.stage = Stage.ENDED
        self._leave_turns(prompt.submit.key, completed=False)
        self.pool.drain(prompt.submit.key)
        self._events.append(Failed(key=prompt.submit.key, error=error, holds_blocks=True))
