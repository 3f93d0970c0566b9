"""The latency model (services.latency) over a whole table of measured steps: how well its form describes the engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def step_residuals(rows: Sequence[tuple[int, int, float]]) -> list[float | None]:
    """(predicted − measured) ÷ measured of step = a + b·Σcontext + c·batch, for rows (batch, context each, time)."""
    return _residuals([(1.0, batch * context, batch) for batch, context, _ in rows], [time for _, _, time in rows])


def prefill_residuals(rows: Sequence[tuple[int, float]], chunk_tokens: int) -> list[float | None]:
    """The same of prefill = a·chunks + b·l + c·l², for rows (l, time)."""
    forms = [(-(-tokens // chunk_tokens), tokens, tokens**2) for tokens, _ in rows]
    return _residuals(forms, [time for _, time in rows])


def _residuals(forms: Sequence[tuple[float, float, float]], times: Sequence[float]) -> list[float | None]:
    """Least squares of relative errors: a step of one request counts as much as one of 256. None: too few rows."""
    if len(times) < 4:
        return [None] * len(times)  # three coefficients fit three rows whatever they are
    relative = np.asarray(forms, np.float64) / np.asarray(times, np.float64)[:, None]
    coefficients, *_ = np.linalg.lstsq(relative, np.ones(len(times)), rcond=None)
    return [float(value) for value in relative @ coefficients - 1.0]
