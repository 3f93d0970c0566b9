from __future__ import annotations

import itertools
import random

import pytest

from loadtest.arrivals import Mix, plan, poisson


def test_arrivals_are_ordered_and_within_the_run() -> None:
    times = list(poisson(5.0, 100.0, random.Random(1)))
    assert times == sorted(times)
    assert all(0 <= at_s < 100 for at_s in times)


def test_the_mean_rate_is_the_one_asked_for_and_gaps_are_exponential() -> None:
    times = list(poisson(10.0, 10_000.0, random.Random(2)))
    assert len(times) == pytest.approx(100_000, rel=0.02)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean_s = sum(gaps) / len(gaps)
    deviation_s = (sum((gap - mean_s) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation_s == pytest.approx(mean_s, rel=0.03)  # of an exponential distribution, and of few others


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_that_is_not_positive_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate must be positive"):
        list(poisson(rate, 1.0, random.Random(0)))


def test_a_run_of_no_time_sends_nothing() -> None:
    assert plan(5.0, 0.0, seed=0) == ()


def test_the_same_seed_gives_the_same_plan_and_another_one_another() -> None:
    assert plan(2.0, 30.0, seed=3) == plan(2.0, 30.0, seed=3)
    assert plan(2.0, 30.0, seed=3) != plan(2.0, 30.0, seed=4)


def test_prompts_and_answers_stay_in_the_ranges_of_the_mix() -> None:
    mix = Mix(prompt_words=(1, 3), max_tokens=(2, 2))
    planned = plan(20.0, 20.0, seed=0, mix=mix)
    assert {len(request.prompt.split()) for request in planned} == {1, 2, 3}
    assert {request.max_tokens for request in planned} == {2}
