from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from loadtest.client import Measured
from loadtest.report import quantile, summarize, summary_line, summary_table


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [([], 0.5, None), ([7.0], 0.5, 7.0), ([7.0], 0.99, 7.0), ([3.0, 1.0, 2.0], 0.5, 2.0), ([1.0, 2.0], 1.0, 2.0)],
)
def test_small_samples_have_quantiles_too(values: list[float], q: float, expected: float | None) -> None:
    assert quantile(values, q) == expected


def test_a_quantile_is_the_smallest_value_that_the_share_does_not_exceed() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, q) for q in (0.5, 0.9, 0.99, 1.0)] == [50.0, 90.0, 99.0, 100.0]


GOOD = Measured(late_s=0.001, first_token_s=0.2, gaps_s=(0.05, 0.07), total_s=0.32, tokens=3)
BAD = Measured(late_s=0.002, first_token_s=9.0, gaps_s=(9.0,), total_s=9.0, tokens=2, error="UNAVAILABLE")


def test_failed_requests_are_counted_and_do_not_flatter_the_times() -> None:
    summary = summarize([GOOD, BAD, BAD], wall_s=10.0)
    assert (summary.requests, summary.errors, summary.tokens) == (3, {"UNAVAILABLE": 2}, 7)
    assert summary.tokens_per_s == pytest.approx(0.7)
    assert (summary.first_token.max_s, summary.gap.max_s, summary.total.max_s) == (0.2, 0.07, 0.32)
    assert summary.late.max_s == 0.002


def test_a_run_without_requests_has_no_times_and_no_errors() -> None:
    summary = summarize([], wall_s=0.0)
    assert (summary.requests, summary.errors, summary.first_token.p50_s) == (0, {}, None)


def test_the_table_shows_milliseconds_and_errors() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    summary = summarize([GOOD, BAD], wall_s=10.0)
    console.print(summary_table("title", summary))
    assert "200.0" in console.export_text()
    assert "errors: 1 × UNAVAILABLE" in summary_line(summary)


def test_a_summary_is_plain_json() -> None:
    values = json.loads(json.dumps(summarize([GOOD], wall_s=1.0).as_dict()))
    assert values["first_token"]["p50_s"] == 0.2
