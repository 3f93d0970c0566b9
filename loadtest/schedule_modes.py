"""What `python -m loadtest schedule --real` runs, and what comes of a run. Pure: all randomness is in the seeds.

Lengths are those of the simulation: answers divided by ANSWERS, so that a run ends, and prompts by PROMPTS. A CPU is
slow at prompts: a whole one of 1,536 tokens takes it as long as a hundred steps, the simulated GPU eight, and nothing
but prompts would be waited for, whatever the schedule is.

Load 1.0 is the rate at which a machine of the workers' own latency, first come, first served, completes a backlog
(`schedule_runs.saturation`), corrected by how much longer than predicted a mesh takes for one: all its processes share
few cores, and prefill may be what is slowest.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Final

from loadtest.arrivals import Planned, words
from loadtest.client import Measured
from loadtest.report import quantile
from loadtest.schedule_runs import Cell, Run, saturation
from loadtest.workloads import HALF_LONG, Lengths, Workload, half_long, skewed
from services.latency import Latency
from services.schedule.catalog import policy_named
from services.simulation.engine import Simulation
from services.simulation.machine import Machine

ANSWERS: Final = 2
PROMPTS: Final = 8
BATCH: Final = 8
BACKLOG_S: Final = 60.0
BACKLOG: Final = (24, 96)
"""So many requests come at once, between these bounds, as take about so long."""
ALONE: Final = 12
"""Prompts of a warm-up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """A kind of mesh, its traffic, and the schedules that are compared on it.

    `prefill`: its prefill workers. None: aggregated.
    """

    name: str
    prefill: int
    workload: Workload
    policies: Sequence[str]

    def load_1(self, latency: Latency) -> float:
        """Requests a second at which decode workers of that latency are just busy. ValueError: a fit is missing."""
        return saturation(self._decoded, self._machine(latency))

    def backlog(self, latency: Latency) -> list[Planned]:
        """What shows how many requests a mesh completes when there are always more."""
        count = min(max(BACKLOG[0], round(BACKLOG_S * self.load_1(latency))), BACKLOG[1])
        return [replace(one, at_s=0.0) for one in planned(self.workload, 1.0, count, -1)]

    def predicted_backlog_s(self, latency: Latency) -> float:
        """Until all of that is answered, first come, first served, by that latency."""
        count = len(self.backlog(latency))
        requests = [replace(one, arrival_s=0.0) for one in self._decoded.requests(1.0, count, -1)]
        records = Simulation(self._machine(latency), policy_named("fcfs"), requests).run().records
        return max(record.completion_s for record in records)

    def predicted_jct_s(self, latency: Latency, policy: str, rate: float, count: int, seed: int) -> float:
        """Mean completion time of a run, by that latency."""
        requests = self._decoded.requests(rate, count, seed)
        records = Simulation(self._machine(latency), policy_named(policy), requests).run().records
        counted = {request.key for request in requests[count // 10 :]}
        return mean([record.completion_s for record in records if record.request.key in counted])

    def prefill_busy(self, latency: Latency, rate: float) -> float:
        """The share of the time in which prompts are computed, where that happens apart: near 1, decode is not what
        requests wait for.
        """
        assert latency.prefill is not None, "learned"
        requests = self.workload.requests(rate, 200, -1)
        return rate * mean([latency.prefill.prompt_s(request.prompt_tokens) for request in requests]) / self.prefill

    def warm_up(self) -> list[list[Planned]]:
        """What a worker learns its speed from, in waves: each is sent at once, after the one before was answered.

        Prompts one by one; a batch of short contexts; one of long contexts, that thins out. So a step's constant, its
        context and its batch can be told apart. The contexts of a batch are the same, known from one of the prompts.
        """
        rng = random.Random(0)
        lengths = [request.prompt_tokens for request in self.workload.requests(1.0, 200, -1)]
        short, long = words(min(lengths), rng), words(max(lengths), rng)
        prompts = [*(words(length, rng) for length in lengths[:ALONE]), short, long]
        return [
            *([_at_once(prompt, 2)] for prompt in prompts),
            [_at_once(short, 25) for _ in range(BATCH)],
            [_at_once(long, 10 * place) for place in range(1, BATCH + 1)],
        ]

    @property
    def _decoded(self) -> Workload:
        return _without_first_token(self.workload) if self.prefill else self.workload

    def _machine(self, latency: Latency) -> Machine:
        return Machine(latency=latency, batch=BATCH, aggregated=not self.prefill)


def _at_once(prompt: str, tokens: int) -> Planned:
    return Planned(at_s=0.0, prompt=prompt, max_tokens=tokens, seed=0)


def _scaled(lengths: Callable[[random.Random], Lengths]) -> Callable[[random.Random], Lengths]:
    def drawn(rng: random.Random) -> Lengths:
        prompt, output = lengths(rng)
        return max(1, prompt // PROMPTS), max(1, output // ANSWERS)

    return drawn


def _without_first_token(workload: Workload) -> Workload:
    """Where prompts are computed elsewhere, the first token of each answer is."""
    lengths = workload.lengths
    assert lengths is not None, "live traffic is drawn"

    def drawn(rng: random.Random) -> Lengths:
        prompt, output = lengths(rng)
        return prompt, max(1, output - 1)

    return replace(workload, lengths=drawn)


MODES: Final = (
    Mode(
        name="disaggregated",
        prefill=1,
        workload=Workload(name="skewed", lengths=_scaled(skewed)),
        policies=("fcfs", "mlfq", "auto"),
    ),
    Mode(
        name="aggregated",
        prefill=0,
        workload=Workload(name=HALF_LONG, lengths=_scaled(half_long)),
        policies=("fcfs", "mlfq", "mlfq-naive"),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """What is run: `count` requests for each of `seeds` seeds from `first_seed` on, within `limit_s` beside the starts
    of the meshes. `policies`: those compared with first come, first served; none means all of the mode.
    """

    seeds: int = 5
    first_seed: int = 0
    count: int = 300
    limit_s: float = 7200.0
    model: str = "smollm2"
    modes: Sequence[str] = ()
    policies: Sequence[str] = ()

    def chosen(self) -> tuple[Mode, ...]:
        """Its modes with its policies. ValueError: one of the policies is compared in none of the modes."""
        modes = [mode for mode in MODES if not self.modes or mode.name in self.modes]
        known = {policy for mode in modes for policy in mode.policies}
        if unknown := [policy for policy in self.policies if policy not in known]:
            raise ValueError(f"--policy: {unknown[0]!r} is none of {', '.join(sorted(known))}")
        kept = {"fcfs", *(self.policies or known)}
        return tuple(
            replace(mode, policies=tuple(policy for policy in mode.policies if policy in kept)) for mode in modes
        )


def planned(workload: Workload, rate: float, count: int, seed: int) -> list[Planned]:
    """The workload's requests at `rate` a second."""
    rng = random.Random(seed)
    return [
        Planned(
            at_s=request.arrival_s,
            prompt=words(request.prompt_tokens, rng),
            max_tokens=request.output_tokens,
            seed=rng.getrandbits(32),
        )
        for request in workload.requests(rate, count, seed)
    ]


def values(measured: Sequence[Measured]) -> dict[str, float]:
    """What a run's row shows; the first tenth is warm-up. ValueError when a request failed: nothing is comparable."""
    if failed := [one.error for one in measured if one.error]:
        raise ValueError(f"{len(failed)} requests failed: {failed[0]}")
    counted = measured[len(measured) // 10 :]
    jct_s = sorted(one.total_s for one in counted)
    longest = jct_s[-max(1, len(jct_s) // 10) :]
    return {
        "mean_jct_s": mean(jct_s),
        "p95_jct_s": quantile(jct_s, 0.95) or 0.0,
        "p99_jct_s": quantile(jct_s, 0.99) or 0.0,
        "decile_jct_s": mean(longest),
        "latency_per_token_s": mean([one.total_s / one.tokens for one in counted]),
        "ttft_s": mean([one.first_token_s or 0.0 for one in counted]),
        "preemptions": mean([one.preemptions for one in counted]),
        "swap_gb": sum(one.swapped_bytes for one in counted) / 1e9,
        "idle_by_swap": 0.0,  # memory is not the bound here
    }


def skip_join_gain(runs: Sequence[Run]) -> str:
    """What joining at the level of one's own first step is worth where half the prompts are long, a line for each mode
    and load in which it was compared.
    """
    found: dict[Cell, dict[str, dict[int, Mapping[str, float]]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        if run.cell.workload == HALF_LONG and run.cell.policy in ("mlfq", "mlfq-naive"):
            found[run.cell.case][run.cell.policy][run.seed] = run.values
    lines = []
    for cell in sorted(found, key=lambda cell: (cell.mode, cell.load)):
        skip, naive = found[cell]["mlfq"], found[cell]["mlfq-naive"]
        if seeds := skip.keys() & naive.keys():
            mean_jct, per_token = (
                median(naive[seed][name] / skip[seed][name] for seed in seeds)
                for name in ("mean_jct_s", "latency_per_token_s")
            )
            lines.append(
                f"{cell.mode}, load {cell.load:g}, mlfq-naive ÷ mlfq: mean completion {mean_jct:.2f},"
                f" latency per token {per_token:.2f} (median of {len(seeds)})"
            )
    return "\n".join(lines)
