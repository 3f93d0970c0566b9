"""The load test of schedules: what is run, what a run says, how runs are summed up."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count

import pytest
from click.testing import CliRunner

from loadtest.__main__ import main
from loadtest.schedule_costs import LIVE, costs, costs_table, decisions
from loadtest.schedule_report import rows_of, tables
from loadtest.schedule_runs import ALONE, CHUNKED, COMPARED, Cell, Run, cells, run, saturation
from loadtest.workloads import synthetic
from services.simulation.machine import Machine

NAMED = {workload.name: workload for workload in synthetic()}
CELL = Cell(workload="skewed", mode="decode-only", load=0.9, count=60)
FIELDS = {"workload", "mode", "load", "batch", "kv_limited", "policy", "swap"} | {
    "mean_jct_s", "p95_jct_s", "latency_per_token_s", "ttft_s", "idle_by_swap"
}  # fmt: skip


def test_every_case_is_run_first_come_first_served_too() -> None:
    made = list(cells(synthetic(), quick=False))
    assert len(set(made)) == len(made)
    assert {cell.case for cell in made} == {cell.case for cell in made if cell.policy == "fcfs"}
    assert {cell.policy for cell in made} == {*COMPARED, "priority", ALONE}
    assert {cell.batch for cell in made} == {16, 64, 128, 256}
    assert {cell.swap for cell in made if cell.kv_limited} == {"proactive", "reactive", "recompute"}
    assert {cell.mode for cell in made if cell.workload == "skewed"} == {"aggregated", "decode-only"}


def test_long_prompts_come_whole_and_in_chunks() -> None:
    modes = {cell.mode for cell in cells(synthetic(), quick=False) if cell.workload == "half-long"}
    assert modes == {"aggregated", CHUNKED}
    case = Cell(workload="half-long", mode="aggregated", load=0.3, count=60)
    whole, chunks = (run(replace(case, mode=mode), NAMED["half-long"], 0).values for mode in ("aggregated", CHUNKED))
    assert chunks["ttft_s"] > whole["ttft_s"]


def test_quick_is_less_of_the_same() -> None:
    quick, whole = (list(cells(synthetic(), quick=quick)) for quick in (True, False))
    assert len(quick) < len(whole) / 2
    assert max(cell.count for cell in quick) <= 300
    assert {cell.workload for cell in quick} == {cell.workload for cell in whole}


def test_policies_of_a_cell_see_the_same_requests_and_a_seed_gives_the_same_run() -> None:
    crowded = replace(CELL, load=3.0, batch=4)
    first, again = (run(crowded, NAMED["skewed"], 3) for _ in range(2))
    assert first == again
    other = run(replace(crowded, policy="mlfq"), NAMED["skewed"], 3)
    assert other.values["ttft_s"] < first.values["ttft_s"] / 2
    assert first.values["mean_jct_s"] > first.values["ttft_s"] > 0
    assert first.values["p95_jct_s"] <= first.values["p99_jct_s"]
    assert first.values["decile_jct_s"] > first.values["mean_jct_s"]


def test_at_saturation_the_engine_is_just_busy() -> None:
    """Sixteen at a time, 70 decode steps each on average, which take about 31 ms."""
    assert saturation(NAMED["skewed"], Machine()) == pytest.approx(16 / 70 / 0.031, rel=0.1)


@pytest.mark.parametrize("swap", ["proactive", "reactive", "recompute"])
def test_limited_memory_swaps(swap: str) -> None:
    values = run(replace(CELL, policy="mlfq", swap=swap, kv_limited=True, load=1.0), NAMED["skewed"], 0).values
    assert (values["swap_gb"] > 0) == (swap != "recompute")
    assert 0 <= values["idle_by_swap"] < 1


def test_rows_are_means_with_intervals_and_the_median_of_paired_ratios() -> None:
    def runs(policy: str, means: dict[int, float]) -> list[Run]:
        values = {"latency_per_token_s": 1.0, "p95_jct_s": 1.0}
        return [
            Run(cell=replace(CELL, policy=policy), seed=seed, values=values | {"mean_jct_s": value})
            for seed, value in means.items()
        ]

    fcfs, mlfq = rows_of([*runs("mlfq", {2: 1.0, 1: 2.0, 0: 1.0}), *runs("fcfs", {0: 4.0, 1: 2.0, 2: 3.0})])
    assert (fcfs.cell.policy, mlfq.cell.policy) == ("fcfs", "mlfq")
    assert fcfs.values["mean_jct_s"] == 3.0
    assert fcfs.interval["mean_jct_s"] == pytest.approx(4.303 / 3**0.5)
    assert mlfq.better["mean_jct_s"] == 3.0  # of 4, 1 and 3
    assert fcfs.better["mean_jct_s"] == 1.0


def test_a_row_has_every_field_and_a_table_every_row() -> None:
    rows = rows_of(run(replace(CELL, policy=policy), NAMED["skewed"], 0) for policy in ("fcfs", "auto"))
    assert set(json.loads(json.dumps(rows[0].as_dict()))) >= FIELDS
    assert [table.row_count for table in tables(rows)] == [2]


def test_the_command_names_a_workload_that_it_does_not_know() -> None:
    result = CliRunner().invoke(main, ["schedule", "--workload", "tea-time"])
    assert result.exit_code == 1
    assert "'tea-time' is none of skewed," in result.output


def test_costs_are_those_of_the_clock() -> None:
    ticks = count()
    found = costs(lambda: next(ticks) / 1000, policies=("fcfs",), live=LIVE[:3], steps=20)
    assert [(one.live, one.mean_ms, one.p99_ms) for one in found[::2]] == [
        (live, pytest.approx(1.0), pytest.approx(1.0)) for live in LIVE[:3]
    ]
    assert costs_table(found).row_count == 2


def test_decisions_are_timed_alone_and_stand_beside_the_policy_s_part() -> None:
    ticks = count()
    found = decisions(lambda: next(ticks) / 1000, policies=("mlfq",), live=(20, 200), steps=40)
    assert [(one.part, one.live, one.batch) for one in found] == [
        ("decision", live, batch) for live in (20, 200) for batch in (16, 64)
    ]
    assert [one.mean_ms for one in found] == [pytest.approx(1.0)] * 4
    assert costs_table([*found, *costs(lambda: 0.0, policies=("mlfq",), live=(20, 200), steps=4)]).row_count == 4
