"""The online fit: it finds the truth, follows it, forgets nothing it still needs, and is never wild."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.worker.regression import JUDGED_ROWS, LEARNED_ROWS, Matrix, Regression, Vector, nonnegative

TRUTH = (20e-3, 6e-6, 1.2e-3)  # s a step, s a token of context, s a request
Row = tuple[int, int, int]


def regression() -> Regression:
    return Regression(scales=(1.0, 1024.0, 8.0), doubts=(1e-4, 0.1, 0.1))


def time_s(row: Row, coefficients: Vector = TRUTH) -> float:
    return sum(c * x for c, x in zip(coefficients, row, strict=True))


def mixed_rows(seed: int) -> Iterator[Row]:
    """Batches of 1 to 32 with contexts of 50 to 1,500 tokens."""
    source = random.Random(seed)
    while True:
        batch = source.randint(1, 32)
        yield 1, batch * source.randint(50, 1_500), batch


def single_rows() -> Iterator[Row]:
    """One request that grows from 100 to 900 tokens, again and again."""
    for i in itertools.count():
        yield 1, 100 + i % 800, 1


def learn(fit: Regression, rows: Iterator[Row], count: int, time_of: Callable[[Row], float] = time_s) -> None:
    for row in itertools.islice(rows, count):
        fit.learn(row, time_of(row))


def noisy(seed: int, *, spread: float = 0.05, hiccups: float = 0.05, slowed: float = 1.0) -> Callable[[Row], float]:
    """True times with noise, `hiccups` of them ten times as long."""
    source = random.Random(seed)
    return lambda row: time_s(row) * slowed * (1 + source.gauss(0, spread)) * (10 if source.random() < hiccups else 1)


def wrong_by(fit: Regression, row: Row, true_s: float | None = None) -> float:
    true_s = true_s or time_s(row)
    return abs(time_s(row, fit.coefficients) - true_s) / true_s


@pytest.mark.parametrize("rows", [0, LEARNED_ROWS - 1, LEARNED_ROWS, LEARNED_ROWS + JUDGED_ROWS - 1])
def test_a_fit_that_has_seen_too_little_says_so(rows: int) -> None:
    fit = regression()
    learn(fit, mixed_rows(0), rows)
    assert (fit.ready, fit.rows) == (False, rows)
    learn(fit, mixed_rows(1), LEARNED_ROWS + JUDGED_ROWS - rows)
    assert fit.ready


@pytest.mark.parametrize("seed", range(5))
def test_exact_times_give_the_exact_coefficients(seed: int) -> None:
    fit = regression()
    learn(fit, mixed_rows(seed), 200)
    assert fit.coefficients == pytest.approx(TRUTH, rel=0.01)
    assert fit.error < 0.001


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_hiccups_of_ten_times_leave_predictions_within_a_few_percent(seed: int) -> None:
    fit = regression()
    learn(fit, mixed_rows(seed), 500, noisy(seed))
    assert max(wrong_by(fit, row) for row in ((1, 200, 1), (1, 8_000, 16), (1, 32_000, 64))) < 0.06
    assert 0.02 < fit.error < 0.06  # the median of |noise| is 0.034


def test_first_rows_that_are_slow_do_not_stay() -> None:
    fit = regression()
    fit.learn((1, 100, 1), 30.0)
    fit.learn((1, 101, 1), 5.0)
    learn(fit, mixed_rows(3), 60, noisy(3, hiccups=0.0))
    assert max(wrong_by(fit, row) for row in ((1, 8_000, 16), (1, 32_000, 64))) < 0.05


@pytest.mark.parametrize("slowed", [2.0, 0.5])
def test_a_machine_that_changes_its_speed_is_followed(slowed: float) -> None:
    fit = regression()
    learn(fit, mixed_rows(1), 1_000, noisy(1))
    learn(fit, mixed_rows(2), 10, noisy(2, slowed=slowed))
    learn(fit, mixed_rows(4), 190, noisy(4, slowed=slowed))
    assert wrong_by(fit, (1, 8_000, 16), time_s((1, 8_000, 16)) * slowed) < 0.08
    assert fit.error < 0.12


def test_an_error_after_a_change_is_told_before_it_is_learned_away() -> None:
    fit = regression()
    learn(fit, mixed_rows(1), 200)
    learn(fit, mixed_rows(2), 40, lambda row: 2 * time_s(row))
    assert fit.error > 0.2


def test_many_steps_of_one_kind_do_not_lose_what_the_other_kinds_cost() -> None:
    """Plain exponential forgetting fails this: batch 1 alone cannot tell the constant from the cost of a request."""
    fit = regression()
    learn(fit, mixed_rows(1), 500, noisy(1))
    learn(fit, single_rows(), 20_000, noisy(2))
    assert max(wrong_by(fit, row) for row in ((1, 500, 1), (1, 8_000, 16), (1, 32_000, 64))) < 0.06


def test_what_the_rows_leave_open_goes_to_the_coefficient_with_the_least_doubt() -> None:
    fit = regression()
    learn(fit, itertools.repeat((1, 0, 1)), 100)
    alone = time_s((1, 0, 1))
    assert fit.coefficients == pytest.approx((alone, 0.0, 0.0), rel=0.01, abs=0.001 * alone)


@pytest.mark.parametrize("no_time", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_passed_over(no_time: float) -> None:
    fit, same = regression(), regression()
    for row in itertools.islice(mixed_rows(1), 50):
        same.learn(row, time_s(row))
        fit.learn(row, time_s(row))
        fit.learn(row, no_time)
    assert (fit.coefficients, fit.rows, fit.error) == (same.coefficients, same.rows, same.error)


def test_one_absurdly_short_time_does_not_outweigh_the_others() -> None:
    fit = regression()
    learn(fit, mixed_rows(1), 100)
    fit.learn((1, 8_000, 16), 1e-6)
    assert wrong_by(fit, (1, 8_000, 16)) < 0.15
    learn(fit, mixed_rows(2), 100)
    assert wrong_by(fit, (1, 8_000, 16)) < 0.02


def test_the_error_is_that_of_predictions_made_before() -> None:
    fit, mine = regression(), []
    times = noisy(7, hiccups=0.0)
    for i, row in enumerate(itertools.islice(mixed_rows(7), 60)):
        measured_s = times(row)
        if i >= LEARNED_ROWS:
            mine.append(abs(time_s(row, fit.coefficients) - measured_s) / measured_s)
        fit.learn(row, measured_s)
    assert fit.error == pytest.approx(median(mine))


rows_and_times = st.lists(
    st.tuples(
        st.builds(lambda batch, context: (1, batch * context, batch), st.integers(1, 256), st.integers(1, 8_000)),
        st.floats(1e-6, 1e3),
    ),
    max_size=80,
)


@settings(max_examples=60, deadline=None)
@example([((1, 1, 1), duration_s) for duration_s in (1e-5, 1.0, 69.0, 69.0)])  # one row weighs 10¹³ times the others
@given(rows_and_times)
def test_whatever_was_measured_coefficients_are_finite_and_not_negative(measured: list[tuple[Row, float]]) -> None:
    fit = regression()
    for row, duration_s in measured:
        fit.learn(row, duration_s)
        assert all(math.isfinite(value) and value >= 0 for value in fit.coefficients)
    if measured and fit.ready:
        assert math.isfinite(fit.error)
        longest_s = max(duration_s for _, duration_s in measured)
        assert time_s(measured[-1][0], fit.coefficients) < 1e4 * longest_s


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.floats(1e-6, 1.0)] * 3), st.integers(0, 1_000), st.sampled_from([1e-3, 1.0, 1e3]))
def test_any_true_costs_are_found_in_any_unit(truth: Vector, seed: int, unit: float) -> None:
    fit = regression()
    scaled = (truth[0] * unit, truth[1] * unit / 1024, truth[2] * unit / 8)
    learn(fit, mixed_rows(seed), 200, lambda row: time_s(row, scaled))
    for row in itertools.islice(mixed_rows(seed + 1), 20):
        assert time_s(row, fit.coefficients) == pytest.approx(time_s(row, scaled), rel=0.03)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-2, 2)] * 3), min_size=3, max_size=6), st.tuples(*[st.floats(-3, 3)] * 3))
def test_the_nearest_point_without_negatives_is_the_nearest(rows: list[Vector], centre: Vector) -> None:
    """The oracle follows the gradient, projected onto what is allowed, until it stands still."""
    matrix = np.array(rows).T @ np.array(rows) + 0.05 * np.eye(3)
    information: Matrix = tuple(tuple(row) for row in matrix.tolist())  # type: ignore[assignment]
    found = np.array(nonnegative(centre, information))
    assert found.min() >= 0
    theta, rate = np.zeros(3), 1 / np.linalg.eigvalsh(matrix)[-1]
    for _ in range(2_000):
        theta = np.maximum(0, theta - rate * (matrix @ (theta - np.array(centre))))

    def cost(point: np.ndarray) -> float:
        return float((point - centre) @ matrix @ (point - centre))

    assert cost(found) <= cost(theta) + 1e-6
