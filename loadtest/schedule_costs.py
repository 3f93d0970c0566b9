"""What a step's decision costs this machine, by how many requests live: the policy's part, and all of it.

All of it is what a decode worker does before a step: the policy's choice, the swap plan, and carrying it out on the
block accounting, with memory for three batches, so that requests move all the time. It is measured on the worker's own
core, whose steps and copies take no time here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Final

from rich.table import Table

from kvtransfer.blocks import BlockPool
from services.decode.core import DecodeCore
from services.decode.memory import Memory
from services.decode.messages import Copied, Copy, Finished, Submit
from services.engine.prefix import PrefixCache
from services.engine.sampling_spec import SamplingSpec
from services.schedule.budget import Bandwidth, Reserve
from services.schedule.catalog import policy_named
from services.schedule.policy import Job
from services.schedule.swap import SwapMode, Swapper
from services.worker.work import Computed

LIVE: Final = (100, 1_000, 10_000, 100_000)
BATCHES: Final = (16, 64)
STEP_S: Final = 0.03
WARM_UP: Final = 50
"""Steps that are not counted: all that live at first have arrived at one moment, and are promoted at one moment."""
BLOCK_TOKENS: Final = 16
PROMPT_TOKENS: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one step with as many arrivals as ends: `mean_ms`, and that of the slowest hundredth at least `p99_ms`.

    `part`: "policy", or "decision" for all of it.
    """

    policy: str
    part: str
    live: int
    batch: int
    mean_ms: float
    p99_ms: float


def costs(
    clock: Callable[[], float],
    *,
    policies: Sequence[str] = ("fcfs", "mlfq", "auto"),
    live: Sequence[int] = LIVE,
    batches: Sequence[int] = BATCHES,
    steps: int = 400,
) -> list[Cost]:
    """`clock`: seconds of CPU time. Every step ends a tenth of its batch, and as many arrive."""
    sizes = [(count, batch) for count in live for batch in batches]
    return [_cost(policy, count, batch, steps, clock) for policy in policies for count, batch in sizes]


def decisions(
    clock: Callable[[], float],
    *,
    policies: Sequence[str] = ("fcfs", "mlfq"),
    live: Sequence[int] = LIVE,
    batches: Sequence[int] = BATCHES,
    steps: int = 200,
) -> list[Cost]:
    """All that a worker decides before a step, `clock` as above; whoever ends is followed by another."""
    sizes = [(count, batch) for count in live for batch in batches]
    return [_decision(policy, count, batch, steps, clock) for policy in policies for count, batch in sizes]


def _cost(name: str, live: int, batch: int, steps: int, clock: Callable[[], float]) -> Cost:
    numbers, policy = random.Random(0), policy_named(name, step_s=STEP_S)
    for index in range(live):
        policy.arrive(Job(key=f"first {index}", first_step_s=numbers.choice((0.03, 0.1, 0.4))), 0.0)
    spent_s, now_s = [], 0.0
    for step in range(-WARM_UP, steps):
        come = [Job(key=f"{step} {place}", first_step_s=STEP_S) for place in range(max(1, batch // 10))]
        begin_s = clock() if step >= 0 else 0.0
        for job in come:
            policy.arrive(job, now_s)
        chosen = policy.choose(batch, now_s)
        now_s += STEP_S
        policy.ran(chosen, STEP_S, now_s)
        policy.measured(STEP_S)
        for key in chosen[: len(come)]:
            policy.finish(key)
        policy.take_changes()
        if step >= 0:
            spent_s.append(clock() - begin_s)
    return _summed("policy", name, live, batch, spent_s)


def _decision(name: str, live: int, batch: int, steps: int, clock: Callable[[], float]) -> Cost:
    numbers, core = random.Random(0), _core(name, live, batch)
    spent_s, now_s, made, ended = [], 0.0, 0, live
    copies: list[Copied] = []
    for step in range(-WARM_UP, steps):
        for index in range(made, made + ended):
            core.apply(_submit(index, numbers), now_s)
        made, ended = made + ended, 0
        for copied in copies:
            core.apply(copied, now_s)
        begin_s = clock() if step >= 0 else 0.0
        work = core.plan(now_s)
        if step >= 0:
            spent_s.append(clock() - begin_s)
        now_s += STEP_S
        computed = Computed(token_id=1)
        results = [computed if one.slice.wants_logits else Computed(token_id=None) for one in work]
        core.complete(work, results, now_s)
        events = core.take_events()
        copies = [Copied(key=event.key, seconds=STEP_S / 2) for event in events if isinstance(event, Copy)]
        ended = sum(isinstance(event, Finished) for event in events)
    return _summed("decision", name, live, batch, spent_s)


def _core(name: str, live: int, batch: int) -> DecodeCore:
    """Of a worker with memory for the prompts of three batches and some answers, and a large enough host."""
    pool = BlockPool(batch * 3 * 2 * PROMPT_TOKENS // BLOCK_TOKENS)
    host = BlockPool(live * PROMPT_TOKENS // BLOCK_TOKENS)
    swapper = Swapper(
        mode=SwapMode.PROACTIVE,
        block_bytes=1 << 20,
        block_tokens=BLOCK_TOKENS,
        bandwidth=Bandwidth(bytes_per_s=25e9),
        reserve=Reserve(total_blocks=pool.counts().total),
    )
    prefix = PrefixCache(pool, block_tokens=BLOCK_TOKENS, fingerprint="")
    memory = Memory(pool=pool, host=host, prefix=prefix, swapper=swapper)
    return DecodeCore(
        memory=memory, policy=policy_named(name, step_s=STEP_S), chunk_tokens=PROMPT_TOKENS * 8, max_batch=batch
    )


def _submit(index: int, numbers: random.Random) -> Submit:
    """A prompt that begins like no other one, and a short or a long answer."""
    return Submit(
        key=str(index),
        token_ids=(index, *range(PROMPT_TOKENS - 1)),
        sampling=SamplingSpec(),
        max_new_tokens=numbers.choice((8, 8, 8, 64, 300)),
        stop_token_ids=frozenset(),
        local=True,
    )


def _summed(part: str, name: str, live: int, batch: int, spent_s: Sequence[float]) -> Cost:
    slowest = sorted(spent_s)[int(len(spent_s) * 0.99)]
    return Cost(policy=name, part=part, live=live, batch=batch, mean_ms=mean(spent_s) * 1e3, p99_ms=slowest * 1e3)


def costs_table(found: Sequence[Cost]) -> Table:
    """For people."""
    made = Table(title="cost of a decision, ms a step (mean, slowest hundredth)", title_justify="left")
    sizes = list(dict.fromkeys(one.live for one in found))
    for column in ("policy", "part", "batch", *(f"{live:,} live" for live in sizes)):
        made.add_column(column, justify="right")
    by_size = {(one.policy, one.part, one.batch, one.live): one for one in found}
    for policy, part, batch in dict.fromkeys((one.policy, one.part, one.batch) for one in found):
        row = [by_size[policy, part, batch, live] for live in sizes]
        made.add_row(policy, part, str(batch), *(f"{one.mean_ms:.3f}, {one.p99_ms:.3f}" for one in row))
    return made
