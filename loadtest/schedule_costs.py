"""What a step of a policy costs this machine, by how many requests live."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Final

from rich.table import Table

from services.schedule.catalog import policy_named
from services.schedule.policy import Job

LIVE: Final = (100, 1_000, 10_000, 100_000)
STEP_S: Final = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one step with as many arrivals as ends: `mean_ms`, and that of the slowest hundredth at least `p99_ms`."""

    policy: str
    live: int
    batch: int
    mean_ms: float
    p99_ms: float


def costs(
    clock: Callable[[], float],
    *,
    policies: Sequence[str] = ("fcfs", "mlfq", "auto"),
    live: Sequence[int] = LIVE,
    steps: int = 400,
) -> list[Cost]:
    """`clock`: seconds of CPU time. Every step ends a tenth of its batch, and as many arrive."""
    sizes = [(count, batch) for count in live for batch in (16, 64)]
    return [_cost(policy, count, batch, steps, clock) for policy in policies for count, batch in sizes]


def _cost(name: str, live: int, batch: int, steps: int, clock: Callable[[], float]) -> Cost:
    numbers, policy = random.Random(0), policy_named(name, step_s=STEP_S)
    for index in range(live):
        policy.arrive(Job(key=f"first {index}", first_step_s=numbers.choice((0.03, 0.1, 0.4))), 0.0)
    spent_s, now_s = [], 0.0
    for step in range(-steps // 4, steps):  # the first ones are not counted: all that lived have arrived at one moment
        come = [Job(key=f"{step} {place}", first_step_s=STEP_S) for place in range(max(1, batch // 10))]
        begin_s = clock()
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
    slowest = sorted(spent_s)[int(len(spent_s) * 0.99)]
    return Cost(policy=name, live=live, batch=batch, mean_ms=mean(spent_s) * 1e3, p99_ms=slowest * 1e3)


def costs_table(found: Sequence[Cost]) -> Table:
    """For people."""
    made = Table(title="cost of a policy, ms a step (mean, slowest hundredth)", title_justify="left")
    sizes = list(dict.fromkeys(one.live for one in found))
    for column in ("policy", "batch", *(f"{live:,} live" for live in sizes)):
        made.add_column(column, justify="right")
    by_size = {(one.policy, one.batch, one.live): one for one in found}
    for policy, batch in dict.fromkeys((one.policy, one.batch) for one in found):
        row = [by_size[policy, batch, live] for live in sizes]
        made.add_row(policy, str(batch), *(f"{one.mean_ms:.3f}, {one.p99_ms:.3f}" for one in row))
    return made
