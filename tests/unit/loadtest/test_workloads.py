"""Simulated traffic: the same for the same seed, with the lengths and gaps that it says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest

from loadtest.workloads import MOST_TOKENS, Workload, synthetic, traced

NAMED = {workload.name: workload for workload in synthetic()}


@pytest.mark.parametrize("name", NAMED)
def test_a_seed_gives_the_same_requests_and_another_one_others(name: str) -> None:
    first, again, other = (NAMED[name].requests(2.0, 50, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({request.key for request in first}) == len(first) >= 50
    assert [request.arrival_s for request in first] == sorted(request.arrival_s for request in first)


@pytest.mark.parametrize("name", [name for name in NAMED if name != "flood"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_there_are_as_many_requests_as_asked_for(name: str, count: int) -> None:
    assert len(NAMED[name].requests(2.0, count, 0)) == count


@pytest.mark.parametrize(("name", "cv"), [("gamma-1", 1.0), ("gamma-4", 4.0)])
def test_gaps_have_the_rate_and_the_variation(name: str, cv: float) -> None:
    times = [request.arrival_s for request in NAMED[name].requests(5.0, 20_000, 0)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.2, rel=0.03 * cv)  # four standard errors
    assert stdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.08)


@pytest.mark.parametrize(
    ("name", "prompt", "output", "variation"),
    [
        ("skewed", 164, 70, 2.7),
        ("sharegpt-like", 150, 310, 1.0),
        ("alpaca-like", 19, 58, 1.3),
        ("gamma-1", 256, 200, 0.9),
    ],
)
def test_lengths_have_the_means_and_the_variation(name: str, prompt: int, output: int, variation: float) -> None:
    made = NAMED[name].requests(5.0, 20_000, 0)
    outputs = [request.output_tokens for request in made]
    assert mean(request.prompt_tokens for request in made) == pytest.approx(prompt, rel=0.1)
    assert mean(outputs) == pytest.approx(output, rel=0.1)
    assert stdev(outputs) / mean(outputs) == pytest.approx(variation, rel=0.12)
    assert max(request.prompt_tokens + request.output_tokens for request in made) <= MOST_TOKENS


def test_the_light_tenant_of_a_flood_sends_the_same_with_and_without_it() -> None:
    made = NAMED["flood"].requests(8.0, 400, 0)
    light = [request for request in made if request.tenant == "light"]
    flood = [request.arrival_s for request in made if request.tenant == "flood"]
    last_s = light[-1].arrival_s
    assert len(light) == 400
    assert last_s == pytest.approx(400 / 2, rel=0.15)
    assert last_s / 3 < min(flood) < max(flood) < last_s * 0.68
    assert len(flood) == pytest.approx(last_s / 3 * 16, rel=0.1)


def test_a_trace_keeps_its_order_and_lengths_on_another_clock(tmp_path: Path) -> None:
    rows = "\n".join(f"{at},{at + 100},{at}" for at in range(0, 50, 5))
    (tmp_path / "azure_2023_conv.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}\n")
    (workload,) = traced(tmp_path)
    made = workload.requests(2.0, 4, 0)
    assert workload.name == "azure-conv"
    assert [request.arrival_s for request in made] == [0.0, 0.5, 1.0, 1.5]
    assert [b.prompt_tokens - a.prompt_tokens for a, b in pairwise(made)] == [5, 5, 5]
    assert all(request.output_tokens >= 1 for request in workload.requests(2.0, 99, 0))
    assert len(workload.requests(2.0, 99, 0)) == 10


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    assert traced(tmp_path) == ()
    (tmp_path / "azure_2023_code.csv").write_text("time,tokens\n1,2\n")
    with pytest.raises(ValueError, match=r"azure_2023_code\.csv: 'arrival_s'"):
        traced(tmp_path)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="rate"):
        Workload(name="a", lengths=NAMED["skewed"].lengths).requests(0.0, 1, 0)
