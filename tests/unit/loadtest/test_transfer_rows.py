from __future__ import annotations

import pytest

from loadtest.transfer_rows import OURS, RAW, Case, Sample, rows, table

RAW_CASE = Case(layout="8b", tokens=1024, transport=RAW)
OUR_CASE = Case(layout="8b", tokens=1024, transport=OURS)
OVERLAPPED = Case(layout="8b", tokens=1024, transport=OURS, overlap=True)


def samples(*durations_s: float, **more) -> list[Sample]:
    return [Sample(bytes=1_000_000_000, duration_s=duration_s, **more) for duration_s in durations_s]


def test_goodput_is_the_median_of_the_repetitions_ratios_and_not_the_ratio_of_medians() -> None:
    measured = {RAW_CASE: samples(1.0, 2.0, 4.0), OUR_CASE: samples(2.0, 2.0, 5.0)}  # ratios 0.5, 1, 0.8
    row = rows(measured, {})[1]
    assert row.goodput_over_raw == pytest.approx(0.8)
    assert row.gbs == pytest.approx(0.5)


def test_every_row_is_compared_with_the_raw_loop_over_the_same_link() -> None:
    slow_raw = Case(layout="8b", tokens=1024, transport=RAW, link_gbps=1.0)
    slow = Case(layout="8b", tokens=1024, transport=OURS, link_gbps=1.0, overlap=True)
    found = rows({RAW_CASE: samples(1.0), slow_raw: samples(8.0), slow: samples(10.0)}, {})
    assert [row.goodput_over_raw for row in found] == pytest.approx([1.0, 1.0, 0.8])


def test_where_prefill_sets_the_pace_there_is_no_ratio_to_the_raw_loop() -> None:
    paced = samples(0.5, exposed_s=0.02, compute_s=2.0, paced=True)
    row = rows({RAW_CASE: samples(1.0), OVERLAPPED: paced}, {})[1]
    assert row.goodput_over_raw is None
    assert row.exposed_over_prefill == pytest.approx(0.01)


def test_what_was_not_measured_is_null() -> None:
    row = rows({OUR_CASE: samples(1.0)}, {})[0]
    assert (row.goodput_over_raw, row.exposed_over_prefill, row.step_p95_ratio) == (None, None, None)


def test_a_row_has_the_documented_keys_and_a_line_in_the_table() -> None:
    found = rows({OUR_CASE: samples(1.0)}, {OUR_CASE: 1.2})
    keys = ["layout", "tokens", "transport", "link_gbps", "overlap", "gbs", "goodput_over_raw", "exposed_over_prefill"]
    assert list(found[0].as_dict()) == [*keys, "step_p95_ratio"]
    assert found[0].step_p95_ratio == 1.2
    assert table(found).row_count == 1
