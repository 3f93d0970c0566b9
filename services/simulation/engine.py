"""One engine on a virtual clock: the real policy and the real block accounting against a latency model.

A run is steps. Between two of them arrive those whose time has come, the policy chooses, and the memory says who of the
chosen can run. A step with prompts in it is one step; decode steps are taken several at once as long as nobody can
arrive or end, no block is needed, no copy ends, and the policy says that its choice stands (`Policy.steady_steps`).
With nothing to run the clock goes on to the next arrival, or to the end of the next copy.

Not simulated: the hand-off of KV that a decode-only engine gets (a request arrives when its KV could) and clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.schedule.policy import Job, Policy
from services.simulation.machine import Machine, Record, Request
from services.simulation.memory import Memory, MemoryLimit


@dataclass(kw_only=True, slots=True)
class _Live:
    record: Record
    pending: int  # tokens whose KV is still to be computed before it decodes
    context: int  # tokens whose KV is computed, or handed over
    left: int  # tokens still to generate
    last_s: float  # when it last ran, or arrived
    began: bool = False


@dataclass(kw_only=True, slots=True)
class _Step:
    """What runs: rows decode, chunks compute so many pending tokens."""

    rows: list[tuple[str, _Live]] = field(default_factory=list)
    chunks: list[tuple[str, _Live, int]] = field(default_factory=list)
    context: int = 0  # of the rows, their new tokens included

    def add_row(self, key: str, one: _Live) -> None:
        """It decodes a token."""
        self.rows.append((key, one))
        self.context += one.context + 1

    def keys(self) -> list[str]:
        """Of all that run."""
        return [key for key, _ in self.rows] + [key for key, _, _ in self.chunks]


@dataclass(kw_only=True, slots=True)
class Outcome:
    """A run. `peak_tokens`: the most KV that requests which had begun had at one time."""

    records: list[Record] = field(default_factory=list)
    end_s: float = 0.0
    computing_s: float = 0.0  # steps, as they would be without copies beside them
    swap_idle_s: float = 0.0  # waiting for copies, and what they delayed steps by
    swapped_bytes: int = 0
    peak_tokens: int = 0
    turns: int = 0  # of the simulation's loop

    @property
    def idle_by_swap(self) -> float:
        """Share of the engine's time."""
        return self.swap_idle_s / (self.computing_s + self.swap_idle_s) if self.computing_s else 0.0


class Simulation:
    """One run over `requests`, in which every policy is told what it may know. Deterministic."""

    def __init__(
        self, machine: Machine, policy: Policy, requests: Sequence[Request], limit: MemoryLimit | None = None
    ) -> None:
        """Without a limit KV memory is infinite. ValueError when a request fits into none."""
        self._machine, self._policy = machine, policy
        self._requests = sorted(requests, key=lambda request: request.arrival_s)
        self._memory: Memory | None = None
        if limit:
            self._memory = Memory(limit=limit, machine=machine, policy=policy, needed_tokens=self._needed_tokens)
        self._arrived = 0
        self._now_s = 0.0
        self._live: dict[str, _Live] = {}
        self._ran: list[str] = []
        self._tokens = 0
        self._copy_end_s = float("inf")
        self.outcome = Outcome()
        for request in requests:
            if limit and request.prompt_tokens + request.output_tokens > limit.tokens - limit.block_tokens:
                raise ValueError(f"{request.key!r} is larger than a memory of {limit.tokens} tokens")

    def run(self) -> Outcome:
        """To the end of the last request."""
        while self._arrived < len(self._requests) or self._live:
            self.turn()
        self.outcome.end_s = self._now_s
        if self._memory:
            self.outcome.swapped_bytes = self._memory.swapped_bytes
        return self.outcome

    def turn(self) -> None:
        """One time round: arrivals, choice, step or steps."""
        self.outcome.turns += 1
        if not self._live:
            self._now_s = max(self._now_s, self._next_arrival_s())
        self._arrive()
        step = self._step_of(self._runnable(self._choose()))
        self._policy.take_changes()
        if step.rows or step.chunks:
            self._compute(step)
        else:
            self._wait()

    def check(self) -> None:
        """Raises unless the blocks are accounted for."""
        if self._memory:
            self._memory.pool.check()

    def free_blocks(self) -> int:
        """Of the KV pool; 0 where memory is not limited."""
        return self._memory.pool.counts().free if self._memory else 0

    def _next_arrival_s(self) -> float:
        return self._requests[self._arrived].arrival_s if self._arrived < len(self._requests) else float("inf")

    def _needed_tokens(self, key: str) -> int:
        one = self._live[key]
        return one.context + one.pending + 1

    def _arrive(self) -> None:
        machine = self._machine
        while self._next_arrival_s() <= self._now_s:
            request = self._requests[self._arrived]
            self._arrived += 1
            prompt = request.prompt_tokens
            pending, context = (prompt, 0) if machine.aggregated else (0, prompt)
            self._live[request.key] = _Live(
                record=Record(request=request),
                pending=pending,
                context=context,
                left=request.output_tokens,
                last_s=request.arrival_s,
            )
            job = Job(
                key=request.key,
                first_step_s=machine.first_step_s(prompt),
                tenant=request.tenant,
                weight=request.weight,
                priority=request.priority,
                most_tokens=pending + request.output_tokens,
                service_s=machine.service_s(prompt, request.output_tokens),
            )
            self._policy.arrive(job, self._now_s)

    def _choose(self) -> Sequence[str]:
        """As many as a step may have and as have room together."""
        chosen = self._policy.choose(self._machine.batch, self._now_s)
        if self._memory and (fitting := self._memory.fitting(chosen)) < len(chosen):
            chosen = self._policy.choose(fitting, self._now_s)
        return chosen

    def _runnable(self, chosen: Sequence[str]) -> Sequence[str]:
        """Who of the chosen, or in their place, has KV memory; with swaps that have to be waited for, afterwards."""
        if self._memory is None:
            return chosen
        self._copy_end_s = self._memory.arrived(self._now_s)
        live = self._live
        context = sum([live[key].context + 1 for key in chosen])
        step_s = self._machine.step.step_s(context_tokens=context, batch=len(chosen))
        plan = self._memory.plan(chosen, step_s, self._now_s)
        for key in plan.drop:
            one = live[key]
            self._tokens -= one.context
            one.pending, one.context = one.pending + one.context, 0
        stall_s = self._memory.carry_out(plan, self._now_s)
        self.outcome.swap_idle_s += stall_s
        self._now_s += stall_s
        self._copy_end_s = self._memory.arrived(self._now_s)
        return plan.run

    def _step_of(self, keys: Sequence[str]) -> _Step:
        """With whose turn it is; those whose prompts get no token any more leave their places to who decodes next, as
        in a decode worker.
        """
        step = _Step()
        budget = self._machine.prefill.chunk_tokens
        for key in keys:
            one = self._live[key]
            if not one.began:
                one.began = True
                self._tokens += one.context
            if not one.pending:
                step.add_row(key, one)
            elif budget:
                tokens = min(budget, one.pending)
                step.chunks.append((key, one, tokens))
                budget -= tokens
        if self._memory is None and len(step.rows) + len(step.chunks) < len(keys):
            self._fill(step, keys)
        return step

    def _fill(self, step: _Step, keys: Sequence[str]) -> None:
        chosen = set(keys)
        others = [key for key, one in self._live.items() if not one.pending and key not in chosen]
        times = dict(zip(others, self._policy.enst_s(others, self._machine.batch, self._now_s), strict=True))
        for key in sorted(others, key=times.__getitem__)[: len(keys) - len(step.rows) - len(step.chunks)]:
            step.add_row(key, self._live[key])

    def _compute(self, step: _Step) -> None:
        begin_s, batch = self._now_s, len(step.rows)
        rows_s = self._machine.step.step_s(context_tokens=step.context, batch=batch) if batch else 0.0
        steps, first_s = 1, rows_s
        if step.chunks:
            first_s = seconds = self._mixed_s(step)
        else:
            steps = self._steps(step, rows_s)
            rows_s = seconds = rows_s * steps + self._machine.step.b_s * batch * (steps * (steps - 1) // 2)
        delay_s = self._memory.delay_s(begin_s, seconds) if self._memory else 0.0
        self.outcome.computing_s += seconds
        self.outcome.swap_idle_s += delay_s
        self._now_s = begin_s + seconds + delay_s
        self._note_turns(step.keys(), begin_s)
        self._ran_chunks(step)
        self._ran_rows(step, rows_s, steps, begin_s + first_s)
        self.outcome.peak_tokens = max(self.outcome.peak_tokens, self._tokens)

    def _mixed_s(self, step: _Step) -> float:
        tokens = sum(count for _, _, count in step.chunks)
        squares = sum(count * (2 * one.context + count) for _, one, count in step.chunks)
        if not step.rows:
            return self._machine.prefill.step_s(tokens=tokens, squares=squares)
        mixed_s = self._machine.latency.mixed_step_s(
            tokens=tokens, squares=squares, context_tokens=step.context, batch=len(step.rows)
        )
        assert mixed_s is not None, "a machine has both fits"
        return mixed_s

    def _steps(self, step: _Step, step_s: float) -> int:
        """How many decode steps nothing can happen in; later ones are longer, so none of them counts as shorter."""
        most = min([one.left for _, one in step.rows])
        if self._memory:
            most = min(most, *[self._memory.room_tokens(key) - one.context for key, one in step.rows])
        growth_s = self._machine.step.b_s * len(step.rows)
        until_s = min(self._next_arrival_s(), self._copy_end_s) - self._now_s
        for grown in (0, 1):  # first a bound from steps like the first, then one from the longest of so many
            if most > 1:
                longest_s = step_s + growth_s * most * grown
                most = min(most, self._policy.steady_steps(longest_s, self._now_s))
                most = min(most, max(1, -int(-until_s // longest_s))) if until_s < float("inf") else most
        return max(1, most)

    def _note_turns(self, keys: list[str], begin_s: float) -> None:
        """Waits that end with this step, and who had to stop for it."""
        for key in keys:
            one = self._live[key]
            one.record.longest_wait_s = max(one.record.longest_wait_s, begin_s - one.last_s)
            one.last_s = self._now_s
        running = set(keys)
        for key in self._ran:
            if key not in running and key in self._live:
                self._live[key].record.preemptions += 1
        self._ran = keys

    def _ran_rows(self, step: _Step, seconds: float, steps: int, first_token_s: float) -> None:
        if not step.rows:
            return
        self._policy.ran([key for key, _ in step.rows], seconds, self._now_s, steps=steps)
        self._policy.measured(seconds / steps)
        self._tokens += steps * len(step.rows)
        for key, one in step.rows:
            one.context += steps
            one.left -= steps
            if one.record.first_token_s < 0:
                one.record.first_token_s = first_token_s
            if not one.left:
                self._end(key, one)

    def _ran_chunks(self, step: _Step) -> None:
        """A chunk is charged what it would take by itself: rows beside a long prompt have not used so much time."""
        for key, one, count in step.chunks:
            own_s = self._machine.prefill.step_s(tokens=count, squares=count * (2 * one.context + count))
            one.pending -= count
            one.context += count
            first = not one.pending and one.record.first_token_s < 0
            self._policy.computed(key, own_s, self._now_s, tokens=count, first=first)
            self._tokens += count
            if one.pending:
                continue
            one.left -= 1
            if first:
                one.record.first_token_s = self._now_s
            if not one.left:
                self._end(key, one)

    def _end(self, key: str, one: _Live) -> None:
        one.record.end_s = self._now_s
        self.outcome.records.append(one.record)
        self._tokens -= one.context
        del self._live[key]
        self._policy.finish(key)
        if self._memory:
            self._memory.end(key)

    def _wait(self) -> None:
        """Nobody can run: for the next copy, or for somebody who can."""
        next_s = min(self._copy_end_s, self._next_arrival_s())
        if next_s == float("inf"):
            raise RuntimeError(f"{len(self._live)} requests live, none can run, and nothing is under way")
        self.outcome.swap_idle_s += next_s - self._now_s
        self._now_s = next_s
