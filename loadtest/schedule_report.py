"""Sums the runs of schedules up: a row for each cell, tables for people. Pure but for the tables' types."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median, stdev
from typing import Final

from rich.table import Table

from loadtest.schedule_runs import ALONE, NO_SWAP, Cell, Run

T_95: Final = (0.0, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 95 % by degrees of freedom; 1.96 beyond."""
RATIOS: Final = ("mean_jct_s", "latency_per_token_s", "p95_jct_s")


@dataclass(kw_only=True, slots=True)
class Row:
    """A cell. `values` are means over seeds, `interval` half-widths of their 95 % intervals.

    `better`: what first come, first served has, divided by what this has, seed by seed; the median.
    """

    cell: Cell
    seeds: int
    values: Mapping[str, float]
    interval: Mapping[str, float]
    better: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        interval = {f"{name}_ci95": value for name, value in self.interval.items()}
        better = {f"fcfs_over_{name.removesuffix('_s')}": value for name, value in self.better.items()}
        return {**asdict(self.cell), "seeds": self.seeds, **self.values, **interval, **better}


def rows_of(runs: Iterable[Run]) -> list[Row]:
    """In the order of workload, mode, memory, batch, load, policy."""
    by_cell: dict[Cell, dict[int, Mapping[str, float]]] = defaultdict(dict)
    for one in runs:
        by_cell[one.cell][one.seed] = one.values
    baselines = {cell.case: seeds for cell, seeds in by_cell.items() if cell.policy == "fcfs"}
    rows = [_row(cell, seeds, baselines.get(cell.case, {})) for cell, seeds in by_cell.items()]
    return sorted(rows, key=lambda row: (*_place(row.cell), row.cell.policy, row.cell.swap))


def _place(cell: Cell) -> tuple[str, str, bool, int, float]:
    return cell.workload, cell.mode, cell.kv_limited, cell.batch, cell.load


def _row(cell: Cell, seeds: Mapping[int, Mapping[str, float]], baseline: Mapping[int, Mapping[str, float]]) -> Row:
    names = next(iter(seeds.values()))
    samples = {name: [values[name] for values in seeds.values()] for name in names}
    paired = [(baseline[seed], values) for seed, values in seeds.items() if seed in baseline]
    better = {name: median(base[name] / values[name] for base, values in paired) for name in RATIOS} if paired else {}
    return Row(
        cell=cell,
        seeds=len(seeds),
        values={name: mean(sample) for name, sample in samples.items()},
        interval={name: _interval(sample) for name, sample in samples.items()},
        better=better,
    )


def _interval(sample: Sequence[float]) -> float:
    if len(sample) < 2:
        return 0.0
    freedom = len(sample) - 1
    return (T_95[freedom] if freedom < len(T_95) else 1.96) * stdev(sample) / math.sqrt(len(sample))


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One for each workload, mode and kind of memory."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        memory = ", KV-limited" if row.cell.kv_limited else ""
        groups[f"{row.cell.workload}, {row.cell.mode}{memory}"].append(row)
    for title, group in groups.items():
        yield _table(title, group)


def _table(title: str, rows: Sequence[Row]) -> Table:
    made = Table(
        title=f"{title} (s; fcfs ÷: how many times better than first come, first served)", title_justify="left"
    )
    for column in ("load", "batch", "policy"):
        made.add_column(column)
    numbers = ("mean", "±", "P95", "P99", "longest 10 %", "/token", "first", "fcfs ÷ mean", "÷ /token", "preempted")
    for column in (*numbers, "swap GB", "idle"):
        made.add_column(column, justify="right")
    for row in rows:
        cell, values = row.cell, row.values
        policy = cell.policy if cell.swap == NO_SWAP else f"{cell.policy}, {cell.swap}"
        times = (values["mean_jct_s"], row.interval["mean_jct_s"], values["p95_jct_s"], values["p99_jct_s"])
        more = (values["decile_jct_s"], values["latency_per_token_s"], values["ttft_s"])
        better = [f"{row.better[name]:.2f}" if row.better else "" for name in ("mean_jct_s", "latency_per_token_s")]
        swaps = (f"{values['preemptions']:.1f}", f"{values['swap_gb']:,.0f}", f"{values['idle_by_swap']:.1%}")
        name = "light tenant alone" if policy == ALONE else policy
        made.add_row(
            f"{cell.load:g}", str(cell.batch), name, *(f"{time:.3g}" for time in (*times, *more)), *better, *swaps
        )
    return made
