"""What the figures of load tests have in common. Importing this imports no matplotlib, an extra; `*_figure`s do."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY: Final = "#777777"
BLUE: Final = "#0b6e99"
RED: Final = "#b5432e"
GOLD: Final = "#c9a227"
DPI: Final = 200


def require_matplotlib() -> None:
    """ClickException: it is not installed."""
    if find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs matplotlib: pip install 'diptych[plots]'")


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes it as PNG and SVG into the folder, which is made, and says on stderr where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}.{suffix}" for suffix in ("png", "svg")]
    for path in written:
        figure.savefig(path, dpi=DPI, bbox_inches="tight")
        click.echo(f"drawn: {path}", err=True)
    return written


def dress(axes: Axes, *, x: str = "", y: str = "", grid: Literal["both", "x", "y"] = "y") -> None:
    """Labels its axes, and takes away what says nothing."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.3)


def legend_above(figure: Figure, axes: Axes) -> None:
    """One legend for panels that all show what `axes` shows."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)


def plain_ticks(axes: Axes, axis: str) -> None:
    """1, 2, 5, 10, 20 … instead of powers, on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    chosen = axes.xaxis if axis == "x" else axes.yaxis
    chosen.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    chosen.set_minor_locator(NullLocator())
    chosen.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
