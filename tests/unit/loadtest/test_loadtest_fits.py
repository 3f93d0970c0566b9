from __future__ import annotations

import pytest

from loadtest.fits import prefill_residuals, step_residuals


def test_times_that_follow_the_model_leave_nothing_and_one_that_does_not_stands_out() -> None:
    shapes = [(1, 160), (4, 160), (8, 160), (16, 160), (1, 1024), (8, 1024), (16, 1024)]
    rows = [(batch, context, 9.0 + 0.001 * batch * context + 0.5 * batch) for batch, context in shapes]
    assert step_residuals(rows) == pytest.approx([0.0] * len(rows), abs=1e-9)
    rows[2] = (*rows[2][:2], rows[2][2] * 3)
    residuals = [value for value in step_residuals(rows) if value is not None]
    assert min(residuals) == residuals[2] < -0.3


def test_a_prompts_chunks_each_cost_the_constant() -> None:
    rows = [
        (tokens, 0.02 * -(-tokens // 256) + 0.003 * tokens + 1e-7 * tokens**2)
        for tokens in (128, 512, 1024, 4096, 8000)
    ]
    assert prefill_residuals(rows, 256) == pytest.approx([0.0] * len(rows), abs=1e-9)


def test_three_coefficients_say_nothing_about_three_rows() -> None:
    assert step_residuals([(1, 1, 1.0), (2, 1, 2.0), (1, 2, 3.0)]) == [None] * 3
    assert step_residuals([]) == []
