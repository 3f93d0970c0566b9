"""Sums a run up. Pure but for the table's types."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from loadtest.client import Measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Quantiles of a sample, in seconds; None when it is empty."""

    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    max_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A run. `late_s` says whether the load generator kept up."""

    requests: int
    errors: dict[str, int]
    tokens: int
    tokens_per_s: float
    first_token: Quantiles
    gap: Quantiles
    total: Quantiles
    late: Quantiles

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


def quantile(values: Sequence[float], q: float) -> float | None:
    """Nearest rank: the smallest value that at least a share `q`, in (0, 1], of the sample does not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def summarize(measured: Sequence[Measured], wall_s: float) -> Summary:
    """Sums up; requests that failed count in `errors` and in no quantile but `late`."""
    good = [one for one in measured if not one.error]
    tokens = sum(one.tokens for one in measured)
    return Summary(
        requests=len(measured),
        errors=dict(Counter(one.error for one in measured if one.error)),
        tokens=tokens,
        tokens_per_s=tokens / wall_s if wall_s > 0 else 0.0,
        first_token=quantiles([one.first_token_s for one in good if one.first_token_s is not None]),
        gap=quantiles([gap_s for one in good for gap_s in one.gaps_s]),
        total=quantiles([one.total_s for one in good]),
        late=quantiles([one.late_s for one in measured]),
    )


def quantiles(values: Sequence[float]) -> Quantiles:
    """p50, p90, p99 and the largest value."""
    return Quantiles(
        p50_s=quantile(values, 0.5),
        p90_s=quantile(values, 0.9),
        p99_s=quantile(values, 0.99),
        max_s=quantile(values, 1),
    )


def summary_table(title: str, summary: Summary) -> Table:
    """The table that people read, in milliseconds."""
    table = Table(title=title, title_justify="left")
    for column in ("ms", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    rows = (("first token", summary.first_token), ("gap between tokens", summary.gap), ("whole answer", summary.total))
    for name, row in (*rows, ("sent late by", summary.late)):
        table.add_row(name, *(_ms(value) for value in (row.p50_s, row.p90_s, row.p99_s, row.max_s)))
    return table


def summary_line(summary: Summary) -> str:
    """Counts and errors in one line."""
    errors = ", ".join(f"{count} × {error}" for error, count in summary.errors.items()) or "none"
    return (
        f"{summary.requests} requests, {summary.tokens} tokens, {summary.tokens_per_s:.1f} tokens/s, errors: {errors}"
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:,.1f}"
