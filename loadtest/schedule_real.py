"""`python -m loadtest schedule --real`: schedules on live meshes with the real model, the same traffic for each.

The meshes of a mode stand beside each other and work in turns, seed by seed, so that what is compared was measured
within minutes; an idle mesh uses no core. Lengths are those of the simulation divided by SCALE, so that a run ends.
Load 1.0 is the rate at which the mesh that serves first come, first served completes a backlog: the middle 60 % of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Final

from loadtest.arrivals import Planned, words
from loadtest.client import Measured, run_plan
from loadtest.report import quantile
from loadtest.schedule_runs import Cell, Run
from loadtest.workloads import Workload, half_long, skewed
from services.cli.launch import LaunchedMesh, launched

SCALE: Final = 2
BATCH: Final = 8
LIMIT_S: Final = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """A kind of mesh, its traffic, and the schedules that are compared on it.

    `prefill`: its prefill workers. None: aggregated.
    """

    name: str
    prefill: int
    workload: Workload
    policies: Sequence[str]


MODES: Final = (
    Mode(
        name="disaggregated",
        prefill=1,
        workload=Workload(name="skewed", lengths=skewed),
        policies=("fcfs", "mlfq", "auto"),
    ),
    Mode(
        name="aggregated",
        prefill=0,
        workload=Workload(name="half-long", lengths=half_long),
        policies=("fcfs", "mlfq", "mlfq-naive"),
    ),
)


def live_runs(*, seeds: int, count: int, model: str, say: Callable[[str], None]) -> Iterator[Run]:
    """`count` requests a run at load 1.0; `say` is told what is going on. StartError: a mesh did not come up."""
    for mode in MODES:
        with ExitStack() as stack:
            meshes = {policy: stack.enter_context(_mesh(mode, policy, model)).grpc for policy in mode.policies}
            rate = _saturation(_sent(meshes["fcfs"], planned(mode.workload, float("inf"), max(16, count // 4), -1)))
            say(f"{mode.name}: load 1.0 is {rate:.2f} requests a second")
            for seed in range(seeds):
                for policy, address in meshes.items():
                    cell = Cell(
                        workload=mode.workload.name, mode=mode.name, load=1.0, batch=BATCH, policy=policy, count=count
                    )
                    measured = _sent(address, planned(mode.workload, rate, count, seed))
                    yield Run(cell=cell, seed=seed, values=values(measured))
                    say(f"{mode.name}, {policy}, seed {seed}: done")


def planned(workload: Workload, rate: float, count: int, seed: int) -> list[Planned]:
    """The workload's requests at `rate` a second, or all at once, with lengths divided by SCALE."""
    backlog = rate == float("inf")
    rng = random.Random(seed)
    return [
        Planned(
            at_s=0.0 if backlog else request.arrival_s,
            prompt=words(max(1, request.prompt_tokens // SCALE), rng),
            max_tokens=max(1, request.output_tokens // SCALE),
            seed=rng.getrandbits(32),
        )
        for request in workload.requests(1.0 if backlog else rate, count, seed)
    ]


def values(measured: Sequence[Measured]) -> dict[str, float]:
    """What a run's row shows; the first tenth is warm-up. ValueError when a request failed: nothing is comparable."""
    if failed := [one.error for one in measured if one.error]:
        raise ValueError(f"{len(failed)} requests failed: {failed[0]}")
    counted = measured[len(measured) // 10 :]
    jct_s = sorted(one.total_s for one in counted)
    longest = jct_s[-max(1, len(jct_s) // 10) :]
    return {
        "mean_jct_s": _mean(jct_s),
        "p95_jct_s": quantile(jct_s, 0.95) or 0.0,
        "p99_jct_s": quantile(jct_s, 0.99) or 0.0,
        "decile_jct_s": _mean(longest),
        "latency_per_token_s": _mean([one.total_s / one.tokens for one in counted]),
        "ttft_s": _mean([one.first_token_s or 0.0 for one in counted]),
        "preemptions": _mean([float(one.preemptions) for one in counted]),
        "swap_gb": sum(one.swapped_bytes for one in counted) / 1e9,
        "idle_by_swap": 0.0,  # memory is not the bound here
    }


def _mesh(mode: Mode, policy: str, model: str) -> AbstractContextManager[LaunchedMesh]:
    flags = [f"--prefill={mode.prefill}", f"--model={model}", "--log-level=warning"]
    return launched(flags, environ={"DIPTYCH_SCHEDULE": policy, "DIPTYCH_MAX_BATCH": str(BATCH)})


def _sent(address: str, requests: Sequence[Planned]) -> list[Measured]:
    return asyncio.run(run_plan(address, requests, limit_s=LIMIT_S, clock=time.monotonic))


def _saturation(measured: Sequence[Measured]) -> float:
    values(measured)
    ends_s = sorted(one.total_s for one in measured)
    first, last = len(ends_s) // 5, len(ends_s) * 4 // 5
    return (last - first) / (ends_s[last] - ends_s[first])


def _mean(sample: Sequence[float]) -> float:
    return sum(sample) / len(sample)
