"""The figure of an interference run: every gap over time, and how many of them are longer than what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from loadtest.figures import BLUE, GOLD, GREY, RED, dress, plain_ticks, save
from loadtest.interference_report import BAR_MS, Observed

COLORS: Final = (BLUE, RED, GOLD, GREY)


def draw(runs: Sequence[Observed], folder: Path) -> list[Path]:
    """Writes it as PNG and SVG into the folder, which is made; says where it is."""
    return save(over_time(runs), folder, "interference")


def over_time(runs: Sequence[Observed]) -> Figure:
    """A panel for each server, all on one scale: its gaps, and when long prompts were sent. Below, the share of gaps
    under load that are longer than so many milliseconds; the line is the most that the 99th percentile may be.
    """
    figure = Figure(figsize=(10.0, 2.2 * len(runs) + 3.0), layout="constrained")
    *above, last = figure.subplots(len(runs) + 1, 1, height_ratios=[*([2.2] * len(runs)), 3.0])
    for axes, observed, color in zip(above, runs, COLORS * len(runs), strict=False):
        _gaps(axes, observed, color)
        _tail(last, observed, color)
    ends = [end for axes in above for end in axes.get_ylim()]
    for axes in above:
        axes.set_ylim(min(ends), max(ends))
        plain_ticks(axes, "y")
    last.axvline(BAR_MS, color=GREY, linewidth=1, linestyle=":")
    last.axhline(0.01, color=GREY, linewidth=1, linestyle=":")
    last.set_xscale("log")
    last.set_yscale("log")
    plain_ticks(last, "x")
    last.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    dress(last, x="gap between two tokens, ms", y="share of gaps that are longer", grid="both")
    last.legend(frameon=False)
    return figure


def _gaps(axes: Axes, observed: Observed, color: str) -> None:
    found = [*observed.gaps(loaded=False), *observed.gaps(loaded=True)]
    axes.plot([gap.at_s for gap in found], [gap.gap_s * 1e3 for gap in found], ".", color=color, markersize=3)
    prompts = [answer.sent_s for answer in observed.answers if answer.long and answer.sent_s < observed.end_s]
    for sent_s in prompts:
        axes.axvline(sent_s, color=GREY, linewidth=0.6, alpha=0.6)
    axes.set_xlim(0.0, observed.end_s)
    axes.set_yscale("log")
    dress(axes, x="s (lines: a long prompt is sent)", y="gap, ms")
    axes.set_title(observed.name, loc="left", fontsize="medium")


def _tail(axes: Axes, observed: Observed, color: str) -> None:
    gaps_ms = sorted(gap.gap_s * 1e3 for gap in observed.gaps(loaded=True))
    longer = [1.0 - rank / len(gaps_ms) for rank in range(len(gaps_ms))]
    axes.step(gaps_ms, longer, where="post", color=color, label=observed.name)
