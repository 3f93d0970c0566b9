"""Two figures of a schedule run: what each schedule does as the load grows, and where feedback queues win and lose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.figures import BLUE, GOLD, GREY, RED, dress, legend_above, plain_ticks, save
from loadtest.schedule_report import Row

LOOKS: Final[Mapping[str, tuple[str, str, float]]] = {
    "fcfs": (GREY, "s", 4),
    "mlfq": (BLUE, "o", 9),
    "auto": (RED, "D", 4),
    "srpt-oracle": (GOLD, "^", 5),
}
"""Colour, marker and its size: auto is mostly where one of the others is, and both are to be seen."""
FIRST: Final = (
    ("skewed", "decode-only"),
    ("skewed", "aggregated"),
    ("sharegpt-like", "aggregated"),
    ("alpaca-like", "aggregated"),
)
"""Workloads and modes whose curves are drawn, before all others."""
MOST_PANELS: Final = 4
BATCH: Final = 16
LEAST_SPAN: Final = 3.0
"""A curve's axis ends at so many times its begin, at least."""
MEASURES: Final = (("mean_jct_s", "mean completion"), ("latency_per_token_s", "latency per token"))

Kind = tuple[str, str]


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes them as PNG and SVG into the folder, which is made; says where they are. Nothing is drawn without rows of
    batch 16 and enough memory.
    """
    plain = [row for row in rows if not row.cell.kv_limited and row.cell.batch == BATCH and row.cell.policy in LOOKS]
    if not plain:
        return []
    return [
        *save(over_load(plain), folder, "schedule-load"),
        *save(over_workloads(plain), folder, "schedule-workloads"),
    ]


def over_load(rows: Sequence[Row]) -> Figure:
    """A column for each of the first kinds of traffic: mean completion and latency per token, by load."""
    by_kind = _by_kind(rows)
    kinds = sorted(by_kind, key=lambda kind: (FIRST.index(kind) if kind in FIRST else len(FIRST), kind))[:MOST_PANELS]
    figure = Figure(figsize=(3.6 * max(2, len(kinds)), 6.4), layout="constrained")
    panels = figure.subplots(2, len(kinds), squeeze=False, sharex=True)
    for column, kind in enumerate(kinds):
        for place, (name, label) in enumerate(MEASURES):
            axes = panels[place][column]
            _curves(axes, by_kind[kind], name)
            last = place == len(MEASURES) - 1
            dress(axes, x="load, share of saturation" if last else "", y="" if column else f"{label}, s")
        panels[0][column].set_title(", ".join(kind))
    legend_above(figure, panels[0][0])
    return figure


def over_workloads(rows: Sequence[Row]) -> Figure:
    """How many times better than first come, first served, at the load nearest to 1; left of 1 it loses."""
    load = min({row.cell.load for row in rows}, key=lambda one: abs(one - 1.0))
    by_kind = _by_kind(row for row in rows if row.cell.load == load and row.better)
    kinds = sorted(by_kind, key=lambda kind: _gain(by_kind[kind], "mlfq", "mean_jct_s"))
    figure = Figure(figsize=(10.0, 1.6 + 0.36 * len(kinds)), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, 2, sharey=True), MEASURES, strict=True):
        for policy, (color, marker, size) in LOOKS.items():
            if policy != "fcfs":
                gains = [_gain(by_kind[kind], policy, name) for kind in kinds]
                axes.plot(gains, range(len(kinds)), marker, color=color, markersize=size, label=policy)
        axes.axvline(1.0, color=LOOKS["fcfs"][0], linewidth=1)
        axes.set_xscale("log")
        plain_ticks(axes, "x")
        axes.set_yticks(range(len(kinds)), [", ".join(kind) for kind in kinds])
        dress(axes, x=f"{label} at load {load:g}: fcfs ÷ policy", grid="both")
    legend_above(figure, axes)
    return figure


def _curves(axes: Axes, rows: Sequence[Row], name: str) -> None:
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        lines[row.cell.policy].append(row)
    for policy, (color, marker, size) in LOOKS.items():
        line = sorted(lines.get(policy, ()), key=lambda row: row.cell.load)
        loads = [row.cell.load for row in line]
        axes.plot(loads, [row.values[name] for row in line], color=color, marker=marker, markersize=size, label=policy)
    axes.set_xticks(sorted({row.cell.load for row in rows}))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    widen = max(1.0, LEAST_SPAN / (high / low)) ** 0.5  # what makes no difference is not to look as if it did
    axes.set_ylim(low / widen, high * widen)
    plain_ticks(axes, "y")


def _by_kind(rows: Iterable[Row]) -> dict[Kind, list[Row]]:
    found: dict[Kind, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.cell.workload, row.cell.mode].append(row)
    return found


def _gain(rows: Iterable[Row], policy: str, name: str) -> float:
    """NaN, which is not drawn, where the policy did not run."""
    return next((row.better[name] for row in rows if row.cell.policy == policy), float("nan"))
