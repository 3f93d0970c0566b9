"""Live runs of schedules: everybody gets the same requests, and a run with failures is no run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from click.testing import CliRunner

from loadtest import schedule_real
from loadtest.__main__ import main
from loadtest.client import Measured
from loadtest.schedule_modes import (
    ANSWERS,
    BACKLOG,
    BATCH,
    MODES,
    PROMPTS,
    Live,
    Mode,
    planned,
    skip_join_gain,
    values,
)
from loadtest.schedule_real import Say, watched
from loadtest.schedule_runs import CHUNKED, Cell, Run, saturation
from loadtest.workloads import synthetic
from services.engine.plan import Slice
from services.engine.sampling_spec import SamplingSpec
from services.errors import StartError
from services.latency import Latency, PrefillFit, StepFit
from services.simulation.machine import Machine
from services.worker.latency import LatencyModel
from services.worker.work import Work

SIMULATED = {workload.name: workload for workload in synthetic()}
STEP = StepFit(a_s=0.02, b_s=4e-6, c_s=0.0015, error=0.0, steps=20)
LATENCY = Latency(
    prefill=PrefillFit(a_s=0.01, b_s=5e-4, c_s=1e-7, chunk_tokens=256, error=0.0, steps=20),
    step=StepFit(a_s=0.02, b_s=0.0, c_s=0.0025, error=0.0, steps=20),
)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_same_seed_sends_the_same_requests_and_another_one_others(mode: Mode) -> None:
    first = planned(mode.workload, 2.0, 40, 3)
    assert first == planned(mode.workload, 2.0, 40, 3)
    assert [one.prompt for one in first] != [one.prompt for one in planned(mode.workload, 2.0, 40, 4)]
    assert mode.policies[0] == "fcfs" and "mlfq" in mode.policies


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_lengths_are_those_of_the_simulation_scaled_and_arrivals_come_at_the_rate(mode: Mode) -> None:
    simulated = SIMULATED[mode.workload.name].requests(2.0, 400, 1)
    live = planned(mode.workload, 2.0, 400, 1)
    assert [one.at_s for one in live] == [one.arrival_s for one in simulated]
    assert [one.max_tokens for one in live] == [one.output_tokens // ANSWERS for one in simulated]
    assert [len(one.prompt.split()) for one in live] == [one.prompt_tokens // PROMPTS for one in simulated]
    assert live[-1].at_s == pytest.approx(400 / 2.0, rel=0.2)


def test_load_1_is_what_decode_alone_completes_where_prompts_are_computed_elsewhere() -> None:
    """A step of eight takes 40 ms and every answer of the skewed mix 34.2 steps on average: its first token is
    prefill's.
    """
    steps = 0.8 * 3 + 0.12 * 31 + 0.08 * 349
    load_1 = MODES[0].load_1(LATENCY)
    assert load_1 == pytest.approx(BATCH / steps / 0.04, rel=0.08)
    whole = saturation(MODES[0].workload, Machine(latency=LATENCY, batch=BATCH))
    assert load_1 / whole == pytest.approx((steps + 1) / steps, abs=0.01)


def test_it_is_said_how_busy_prefill_is() -> None:
    """Prompts of 20 tokens on average, 0.01 s a step and 0.5 ms a token."""
    assert MODES[0].prefill_busy(LATENCY, 4.0) == pytest.approx(4.0 * (0.01 + 20 * 5e-4), rel=0.2)


def test_a_backlog_comes_at_once_and_takes_as_long_as_its_steps() -> None:
    """A step of eight takes 40 ms; at the end a few long answers, of 350 tokens, are alone with theirs."""
    backlog = MODES[0].backlog(LATENCY)
    assert {one.at_s for one in backlog} == {0.0} and len(backlog) == BACKLOG[1]
    least_s = sum(one.max_tokens - 1 for one in backlog) * 0.04 / BATCH
    assert least_s < MODES[0].predicted_backlog_s(LATENCY) < least_s + 350 * 0.04
    slow = replace(LATENCY, prefill=PrefillFit(a_s=2, b_s=0.01, c_s=0, chunk_tokens=256, error=0.0, steps=20))
    assert len(MODES[1].backlog(slow)) == BACKLOG[0], "a run is not to wait for hours"


def test_load_1_of_an_aggregated_mesh_has_the_prompts_in_it() -> None:
    """Prompts of 100 tokens on average take about 0.06 s by themselves, 17.7 tokens of a step of eight 0.09 s."""
    assert MODES[1].load_1(LATENCY) == pytest.approx(1 / (0.06 + 0.09), rel=0.15)
    with pytest.raises(ValueError, match="both fits are needed"):
        MODES[1].load_1(replace(LATENCY, prefill=None))


def test_modes_and_policies_can_be_chosen_and_first_come_first_served_is_always_there() -> None:
    assert Live().chosen() == MODES
    (one,) = Live(modes=("aggregated",), policies=("mlfq",)).chosen()
    assert (one.name, one.policies) == ("aggregated", ("fcfs", "mlfq"))
    with pytest.raises(ValueError, match="'auto' is none of fcfs, mlfq, mlfq-naive"):
        Live(modes=("aggregated",), policies=("auto",)).chosen()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_warm_up_lets_a_workers_latency_be_told(mode: Mode) -> None:
    """Steps of such a worker, as the waves would make them, are learned from; what comes out is the worker."""
    learning = LatencyModel(chunk_tokens=256)
    *prompts, short, long = mode.warm_up()
    assert {len(wave) for wave in prompts} == {1} and {len(short), len(long)} == {BATCH}
    for wave in (short, long):
        for done in range(1, max(one.max_tokens for one in wave)):
            contexts = [len(one.prompt.split()) + done for one in wave if one.max_tokens > done]
            rows = [Slice(token_ids=(1,), start=context - 1, blocks=(), wants_logits=True) for context in contexts]
            work = [Work(key=str(place), slice=row, sampling=SamplingSpec()) for place, row in enumerate(rows)]
            learning.observe(work, STEP.step_s(context_tokens=sum(contexts), batch=len(contexts)))
    learned = learning.latency.step
    assert learned is not None
    for context_tokens, batch in ((8 * 600, 8), (4 * 600, 4), (50, 1)):
        expected = STEP.step_s(context_tokens=context_tokens, batch=batch)
        assert learned.step_s(context_tokens=context_tokens, batch=batch) == pytest.approx(expected, rel=0.05)


def test_a_run_is_predicted_with_the_policy_that_serves_it() -> None:
    rate = 1.3 * MODES[0].load_1(LATENCY)
    fcfs, mlfq = (MODES[0].predicted_jct_s(LATENCY, policy, rate, 200, 1) for policy in ("fcfs", "mlfq"))
    assert 0 < mlfq < fcfs


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


def one_run(policy: str, seed: int, jct_s: float, *, mode: str = "aggregated") -> Run:
    cell = Cell(workload="half-long", mode=mode, load=1.0, batch=BATCH, policy=policy, count=20)
    measured = [Measured(late_s=0.0, first_token_s=0.5, total_s=jct_s, tokens=4)] * 20
    return Run(cell=cell, seed=seed, values=values(measured))


def test_the_gain_of_skip_join_is_a_median_over_seeds_that_both_ran() -> None:
    naive = [one_run("mlfq-naive", seed, jct_s) for seed, jct_s in enumerate((3.0, 8.0, 2.0))]
    skip = [one_run("mlfq", seed, 2.0) for seed in (0, 1, 2, 3)]
    gain = "aggregated, load 1, mlfq-naive ÷ mlfq: mean completion 1.50, latency per token 1.50 (median of 3)"
    assert skip_join_gain([*naive, *skip]) == gain
    chunks = [one_run(policy, 0, jct_s, mode=CHUNKED) for policy, jct_s in (("mlfq", 1.0), ("mlfq-naive", 2.0))]
    assert skip_join_gain([*chunks, *naive, *skip]).splitlines() == [
        gain,
        "aggregated, chunks, load 1, mlfq-naive ÷ mlfq: mean completion 2.00, latency per token 2.00 (median of 1)",
    ]
    assert skip_join_gain(skip) == ""
    assert skip_join_gain([one_run("mlfq", 0, 2.0, mode="disaggregated")]) == ""


async def test_a_run_that_is_not_over_in_time_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_plan(address: str, requests: object, *, answered: Callable[[], None], **limits: object) -> None:
        answered()
        await asyncio.Event().wait()

    monkeypatch.setattr(schedule_real, "run_plan", run_plan)
    requests = planned(MODES[0].workload, 1.0, 20, 0)
    with pytest.raises(ValueError, match="only 1 of 20 requests were answered within 0 s"):
        await watched("nobody", requests, 0.01, lambda words: None)


def test_no_run_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_real, "live_runs", lambda live, *, say: iter(()))
    result = CliRunner().invoke(main, ["schedule", "--real", "--minutes=1"])
    assert result.exit_code == 1 and "error: --minutes: too few" in result.stderr


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        (StartError("the mesh ended"), 1, "error: the mesh ended"),
        (ValueError("1 requests failed"), 1, "error: 1 requests failed"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_was_measured_before_the_end_is_shown(
    monkeypatch: pytest.MonkeyPatch, end: BaseException, status: int, words: str
) -> None:
    def live_runs(live: Live, *, say: Say) -> Iterator[Run]:
        assert (live.count, live.seeds, live.first_seed, live.limit_s) == (40, 2, 3, 120.0)
        say("one minute")
        yield from runs
        raise end

    runs: Sequence[Run] = [one_run("fcfs", 3, 4.0), one_run("mlfq", 3, 1.0)]
    monkeypatch.setattr(schedule_real, "live_runs", live_runs)
    flags = ["--real", "--requests=40", "--seeds=2", "--first-seed=3", "--minutes=2"]
    result = CliRunner().invoke(main, ["schedule", *flags])
    assert result.exit_code == status
    assert words in result.stderr and "one minute" in result.stderr
    assert "half-long, aggregated" in result.stdout and "4.00" in result.stdout


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_sigterm_ends_a_run_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch, in_a_loop: bool) -> None:
    """It comes between runs, or while requests are sent: the mesh is stopped, and what was measured is shown."""
    stopped = []

    async def sending() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        await asyncio.Event().wait()

    def live_runs(live: Live, *, say: Say) -> Iterator[Run]:
        try:
            yield one_run("fcfs", 0, 4.0)
            if in_a_loop:
                asyncio.run(sending())
            else:
                signal.raise_signal(signal.SIGTERM)
        finally:
            stopped.append("mesh")

    monkeypatch.setattr(schedule_real, "live_runs", live_runs)
    before = signal.getsignal(signal.SIGTERM)
    result = CliRunner().invoke(main, ["schedule", "--real"])
    assert (result.exit_code, stopped) == (143, ["mesh"])
    assert "terminated" in result.stderr and "half-long, aggregated" in result.stdout
    assert signal.getsignal(signal.SIGTERM) is before
