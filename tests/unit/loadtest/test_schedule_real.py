"""Live runs of schedules: everybody gets the same requests, and a run with failures is no run."""

from __future__ import annotations

import pytest

from loadtest.client import Measured
from loadtest.schedule_real import MODES, SCALE, planned, values


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_same_seed_sends_the_same_requests_and_another_one_others(mode) -> None:  # type: ignore[no-untyped-def]
    first = planned(mode.workload, 2.0, 40, 3)
    assert first == planned(mode.workload, 2.0, 40, 3)
    assert [one.prompt for one in first] != [one.prompt for one in planned(mode.workload, 2.0, 40, 4)]
    assert mode.policies[0] == "fcfs" and "mlfq" in mode.policies


def test_lengths_are_those_of_the_simulation_scaled_and_arrivals_come_at_the_rate() -> None:
    workload = MODES[0].workload
    simulated = workload.requests(2.0, 400, 1)
    live = planned(workload, 2.0, 400, 1)
    assert [one.at_s for one in live] == [one.arrival_s for one in simulated]
    assert [one.max_tokens for one in live] == [one.output_tokens // SCALE for one in simulated]
    assert [len(one.prompt.split()) for one in live] == [one.prompt_tokens // SCALE for one in simulated]
    assert live[-1].at_s == pytest.approx(400 / 2.0, rel=0.2)


def test_a_backlog_is_sent_at_once() -> None:
    assert {one.at_s for one in planned(MODES[0].workload, float("inf"), 30, -1)} == {0.0}


def test_a_row_has_means_over_what_follows_the_warm_up() -> None:
    cold = [Measured(late_s=0.0, first_token_s=9.0, total_s=90.0, tokens=1)] * 2
    warm = [
        Measured(late_s=0.0, first_token_s=0.5, total_s=2.0, tokens=4, preemptions=2, swapped_bytes=500_000_000)
    ] * 18
    row = values([*cold, *warm])
    assert (row["mean_jct_s"], row["latency_per_token_s"], row["ttft_s"]) == (2.0, 0.5, 0.5)
    assert (row["preemptions"], row["swap_gb"]) == (2.0, 9.0)


def test_a_run_with_a_failed_request_is_refused() -> None:
    with pytest.raises(ValueError, match="1 requests failed: UNAVAILABLE"):
        values([Measured(late_s=0.0, error="UNAVAILABLE")])
