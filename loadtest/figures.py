"""Two figures of a schedule run: what each schedule does as the load grows, and where feedback queues win and lose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib import use
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.schedule_report import Row

COLORS: Final = {
    "fcfs": "#777777",
    "mlfq": "#0b6e99",
    "mlfq-naive": "#7fb8d0",
    "srpt-oracle": "#c9a227",
    "auto": "#b5432e",
}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes them as PNG and SVG into the folder, which is made; says where they are."""
    use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    plain = [row for row in rows if not row.cell.kv_limited and row.cell.batch == 16 and row.cell.policy in COLORS]
    written = []
    for name, figure in (("load", _over_load(plain)), ("workloads", _over_workloads(plain))):
        for suffix in ("png", "svg"):
            written.append(folder / f"schedule-{name}.{suffix}")
            figure.savefig(written[-1], dpi=200, bbox_inches="tight")
    return written


def _over_load(rows: Sequence[Row]) -> Figure:
    """Mean completion and latency per token of the first workload of the run, by load."""
    first = rows[0].cell
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if (row.cell.workload, row.cell.mode) == (first.workload, first.mode):
            lines[row.cell.policy].append(row)
    figure = Figure(figsize=(11, 4.2))
    panels = (("mean_jct_s", "mean completion (s)"), ("latency_per_token_s", "latency per token (s)"))
    for place, (name, label) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, 2, place)
        for policy, line in lines.items():
            loads = [row.cell.load for row in line]
            bars = [row.interval[name] for row in line]
            axes.errorbar(
                loads, [row.values[name] for row in line], bars, label=policy, color=COLORS[policy], capsize=3
            )
        _dress(axes, "load (share of saturation)", label)
        axes.set_yscale("log")
    figure.axes[0].legend(frameon=False)
    figure.suptitle(f"{first.workload}, {first.mode}, batch {first.batch}")
    return figure


def _over_workloads(rows: Sequence[Row]) -> Figure:
    """How many times better than first come, first served, at the load nearest to 1; below 1 it loses."""
    load = min({row.cell.load for row in rows}, key=lambda one: abs(one - 1.0))
    better: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.cell.load == load and row.better:
            better[f"{row.cell.workload}\n{row.cell.mode}"][row.cell.policy] = row.better["mean_jct_s"]
    figure = Figure(figsize=(max(8.0, 1.1 * len(better)), 4.2))
    axes = figure.add_subplot()
    for place, policy in enumerate(("mlfq", "auto", "srpt-oracle")):
        places = [index + (place - 1) * 0.27 for index in range(len(better))]
        heights = [values.get(policy, 0.0) for values in better.values()]
        axes.bar(places, heights, width=0.25, label=policy, color=COLORS[policy])
    axes.axhline(1.0, color=COLORS["fcfs"], linewidth=1)
    axes.set_xticks(range(len(better)), list(better), fontsize=8)
    _dress(axes, "", f"fcfs ÷ policy, mean completion, load {load:g}")
    axes.legend(frameon=False)
    return figure


def _dress(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
