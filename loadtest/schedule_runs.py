"""Which schedules are compared on what, and one run of it. Pure: all randomness is in the seeds.

Load 1.0 is the rate at which the engine, first come, first served and never without work, completes requests of this
kind: the middle 60 % of a backlog. All policies of a cell get the same requests at the same times. The first tenth of
the requests is warm-up and counted nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Final

from loadtest.report import quantile
from loadtest.workloads import HALF_LONG, Workload
from services.schedule.catalog import policy_named
from services.schedule.fcfs import fcfs
from services.schedule.swap import SwapMode
from services.simulation.engine import Outcome, Simulation
from services.simulation.machine import Machine, Record, Request
from services.simulation.memory import MemoryLimit

LOADS: Final = (0.8, 0.9, 1.0, 1.1)
BATCHES: Final = (16, 64, 128, 256)
WORKING_SET: Final = 3
"""KV-limited: the most that the requests of a run have begun with at one time is so many times what fits."""
COMPARED: Final = ("fcfs", "mlfq", "mlfq-naive", "srpt-oracle", "auto")
NO_SWAP: Final = "none"
CHUNKED: Final = "aggregated, chunks"
"""A mode: prompts in chunks of CHUNK_TOKENS. In mode "aggregated" the synthetic workloads' prompts fit into one step
that nobody preempts, as in FastServe.
"""
CHUNK_TOKENS: Final = 512
ALONE: Final = "alone"
"""Instead of a policy: the light tenant of a flood by itself, first come, first served."""
BACKLOG: Final = 6000
"""Requests: one of twelve is long, and how many are is uncertain by 4 % then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One thing that is measured, over all seeds. `mode`: "aggregated", CHUNKED or "decode-only"."""

    workload: str
    mode: str
    load: float
    batch: int = 16
    kv_limited: bool = False
    policy: str = "fcfs"
    swap: str = NO_SWAP
    count: int = 2000  # requests of a run

    @property
    def case(self) -> Cell:
        """What cells have in common that are to be compared."""
        return replace(self, policy="fcfs", swap=NO_SWAP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What came of one cell with one seed. Times in s; `decile`: mean of the longest tenth of completions."""

    cell: Cell
    seed: int
    values: dict[str, float] = field(default_factory=dict)


def cells(workloads: Sequence[Workload], *, quick: bool) -> Iterator[Cell]:
    """Everything. Quick: fewer loads and requests, no large batches."""
    loads = (0.9, 1.0) if quick else LOADS
    for workload, load in product(workloads, loads):
        for mode in _modes(workload):
            case = Cell(workload=workload.name, mode=mode, load=load, count=_count(workload, quick=quick))
            policies = (*COMPARED, "priority", ALONE) if workload.flood else COMPARED
            yield from (replace(case, policy=policy) for policy in policies)
    if not any(workload.name == "skewed" for workload in workloads):
        return
    for batch, load in () if quick else product(BATCHES[1:], (0.9, 1.0)):
        case = Cell(workload="skewed", mode="decode-only", load=load, batch=batch, count=250 * batch)
        yield from (replace(case, policy=policy) for policy in ("fcfs", "mlfq", "auto"))
    for load in (1.0,) if quick else (0.9, 1.0):
        count = 150 if quick else 400
        case = Cell(workload="skewed", mode="decode-only", load=load, kv_limited=True, count=count)
        yield from (replace(case, policy="mlfq", swap=mode.value) for mode in SwapMode)
        yield from (replace(case, policy=policy, swap="proactive") for policy in ("fcfs", "auto"))


def run(cell: Cell, workload: Workload, seed: int) -> Run:
    """One simulation."""
    machine = _machine(cell)
    rate = cell.load * saturation(workload, machine)
    requests = workload.requests(rate, cell.count, seed)
    limit = _limit(cell, machine, requests) if cell.kv_limited else None
    policy = "fcfs" if cell.policy == ALONE else cell.policy
    if cell.policy == ALONE:
        requests = [request for request in requests if request.tenant == "light"]
    outcome = Simulation(machine, policy_named(policy), requests, limit).run()
    return Run(cell=cell, seed=seed, values=_values(workload, outcome, requests))


@lru_cache(maxsize=64)
def saturation(workload: Workload, machine: Machine) -> float:
    """Requests a second."""
    plain = replace(workload, flood=False)
    backlog = [replace(request, arrival_s=0.0) for request in plain.requests(1.0, BACKLOG, 0)]
    ends_s = sorted(record.end_s for record in Simulation(machine, fcfs(), backlog).run().records)
    first, last = len(ends_s) // 5, len(ends_s) * 4 // 5
    return (last - first) / (ends_s[last] - ends_s[first])


def _machine(cell: Cell) -> Machine:
    machine = Machine(batch=cell.batch, aggregated=cell.mode != "decode-only")
    if cell.mode != CHUNKED:
        return machine
    latency = replace(machine.latency, prefill=replace(machine.prefill, chunk_tokens=CHUNK_TOKENS))
    return replace(machine, latency=latency)


def _modes(workload: Workload) -> Sequence[str]:
    if workload.name == "skewed":
        return ("aggregated", "decode-only")
    if workload.name == HALF_LONG:
        return ("aggregated", CHUNKED)
    served_whole = workload.trace or workload.flood or workload.name in ("sharegpt-like", "alpaca-like")
    return ("aggregated",) if served_whole else ("decode-only",)


def _count(workload: Workload, *, quick: bool) -> int:
    if quick:
        return 300
    return 4000 if workload.name == "skewed" else 1500


def _limit(cell: Cell, machine: Machine, requests: Sequence[Request]) -> MemoryLimit:
    unlimited = Simulation(machine, policy_named("mlfq"), requests).run()
    largest = max(request.prompt_tokens + request.output_tokens for request in requests)
    tokens = max(unlimited.peak_tokens // WORKING_SET, largest + 64)
    return MemoryLimit(swap=SwapMode(cell.swap), tokens=tokens)


def _values(workload: Workload, outcome: Outcome, requests: Sequence[Request]) -> dict[str, float]:
    counted = {request.key for request in requests[len(requests) // 10 :]}
    if workload.flood:
        counted &= {request.key for request in requests if request.tenant == "light"}
    records = [record for record in outcome.records if record.request.key in counted]
    jct_s = sorted(record.completion_s for record in records)
    longest = jct_s[-max(1, len(jct_s) // 10) :]
    first_s = [record.first_token_s - record.request.arrival_s for record in records]
    return {
        "mean_jct_s": _mean(jct_s),
        "p95_jct_s": quantile(jct_s, 0.95) or 0.0,
        "p99_jct_s": quantile(jct_s, 0.99) or 0.0,
        "decile_jct_s": _mean(longest),
        "latency_per_token_s": _mean([record.latency_per_token_s for record in records]),
        "ttft_s": _mean(first_s),
        "longest_wait_s": max(record.longest_wait_s for record in records),
        "preemptions": _preemptions(records),
        "swap_gb": outcome.swapped_bytes / 1e9,
        "idle_by_swap": outcome.idle_by_swap,
    }


def _preemptions(records: Sequence[Record]) -> float:
    return sum(record.preemptions for record in records) / len(records)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
