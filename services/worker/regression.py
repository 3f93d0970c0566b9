"""Least squares in three unknowns, one measured row at a time, for a truth that drifts. Pure.

Plain floats and tuples: on three numbers the calls into a matrix library cost several times the arithmetic, and this
runs between two steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import median

Vector = tuple[float, float, float]
Matrix = tuple[Vector, Vector, Vector]  # symmetric

FORGET = 0.04
"""Share of what was known in a row's direction that the row makes the fit forget: 25 rows are remembered well."""
LEARNED_ROWS = 4
"""Rows that a fit has learned from before its predictions are judged …"""
JUDGED_ROWS = 8
"""… and rows judged before it is ready."""
_RECENT_ROWS = 64  # that the error is the median of
_ROUNDING = 1e-13
_ZERO: Vector = (0.0, 0.0, 0.0)


class Regression:
    """y ≈ θ·x with θ ≥ 0, least squares on the relative error.

    Recursive least squares: `_information` is Σ x xᵀ over rows divided by their measured time, so that an error counts
    in proportion to it, and a hiccup of ten times the time a tenth.
    Old rows are forgotten in the direction of the new one only (Cao and Schwartz, "A directional forgetting algorithm
    based on the decomposition of the information matrix", Automatica 2000): after an hour at batch 1 the fit still
    knows what batch 16 costs, where plain forgetting would have lost it and drifted anywhere. Memory is constant.
    """

    def __init__(self, *, scales: Vector, doubts: Vector) -> None:
        """`scales`: usual sizes of the features, by which they are divided so that the sums stay well-conditioned.

        `doubts`: rows' worth of evidence that a coefficient is zero. It decides only what the rows leave open, so it
        is small where a cost is to be looked for first.
        """
        self._scales = scales
        self._information: Matrix = ((doubts[0], 0.0, 0.0), (0.0, doubts[1], 0.0), (0.0, 0.0, doubts[2]))
        self._centre = _ZERO  # the θ that fits best, negative or not
        self._theta = _ZERO  # the best one that is nowhere negative
        self._unit_s = 1.0  # internal times are multiples of it
        self._first: list[tuple[Vector, float]] = []
        self._errors: deque[float] = deque(maxlen=_RECENT_ROWS)
        self.rows = 0

    @property
    def ready(self) -> bool:
        """Whether it has learned and been judged enough to be believed."""
        return self.rows >= LEARNED_ROWS + JUDGED_ROWS

    @property
    def coefficients(self) -> Vector:
        """Seconds per unit of each feature, never negative; zeros before LEARNED_ROWS."""
        theta, scales, unit_s = self._theta, self._scales, self._unit_s
        return theta[0] * unit_s / scales[0], theta[1] * unit_s / scales[1], theta[2] * unit_s / scales[2]

    @property
    def error(self) -> float:
        """Median of |predicted − measured| ÷ measured over recent rows, each predicted before it was learned from."""
        return median(self._errors)

    def learn(self, features: Sequence[float], measured_s: float) -> None:
        """Takes in one measured row. A time that is no time (a clock that stood still) is passed over."""
        if not (math.isfinite(measured_s) and measured_s > 0):
            return
        self.rows += 1
        x = (features[0] / self._scales[0], features[1] / self._scales[1], features[2] / self._scales[2])
        if self.rows > LEARNED_ROWS:
            measured, predicted = measured_s / self._unit_s, _dot(x, self._theta)
            self._errors.append(abs(predicted - measured) / measured)
            self._update(x, measured, predicted)
            return
        self._first.append((x, measured_s))
        if self.rows == LEARNED_ROWS:  # a median: a process is slow at whatever it does for the first time
            self._unit_s = median(first_s for _, first_s in self._first)
            for first_x, first_s in self._first:
                self._update(first_x, first_s / self._unit_s, 1.0)
            self._first.clear()

    def _update(self, x: Vector, measured: float, predicted: float) -> None:
        # Half the prediction is the least that a row is divided by: one absurdly short time would outweigh all others.
        weight = 1.0 / max(measured, predicted / 2)
        x = (x[0] * weight, x[1] * weight, x[2] * weight)
        seen = _times(self._information, x)
        kept = _plus_square(self._information, -FORGET / _dot(x, seen), seen)
        self._information = _plus_square(kept, 1.0, x)
        gain, missed = _times(_inverse(self._information), x), measured * weight - _dot(x, self._centre)
        was = self._centre
        self._centre = (was[0] + gain[0] * missed, was[1] + gain[1] * missed, was[2] + gain[2] * missed)
        self._theta = nonnegative(self._centre, self._information)


def nonnegative(centre: Vector, information: Matrix) -> Vector:
    """The θ ≥ 0 with the least (θ − centre)ᵀ · information · (θ − centre): the best of the minima over the faces."""
    if min(centre) >= 0:
        return centre
    evidence = _times(information, centre)
    best, most = _ZERO, 0.0
    for face in _minima(centre, evidence, information):
        gain = _dot(evidence, face)  # by how much it is better than zero
        if gain > most and min(face) >= 0:
            best, most = face, gain
    return best


def _minima(centre: Vector, evidence: Vector, information: Matrix) -> Iterator[Vector]:
    """The minima with one and with two of the coefficients held at zero."""
    for i, row in enumerate(_inverse(information)):
        step = centre[i] / row[i]
        on_face = [centre[0] - row[0] * step, centre[1] - row[1] * step, centre[2] - row[2] * step]
        on_face[i] = 0.0  # exactly
        yield on_face[0], on_face[1], on_face[2]
    yield evidence[0] / information[0][0], 0.0, 0.0
    yield 0.0, evidence[1] / information[1][1], 0.0
    yield 0.0, 0.0, evidence[2] / information[2][2]


def _dot(u: Vector, v: Vector) -> float:
    return u[0] * v[0] + u[1] * v[1] + u[2] * v[2]


def _times(m: Matrix, v: Vector) -> Vector:
    return _dot(m[0], v), _dot(m[1], v), _dot(m[2], v)


def _plus_square(m: Matrix, factor: float, v: Vector) -> Matrix:
    """m + factor · v vᵀ."""
    (m00, m01, m02), (_, m11, m12), (_, _, m22) = m
    a, b, c = v
    m01, m02, m12 = m01 + factor * a * b, m02 + factor * a * c, m12 + factor * b * c
    return (m00 + factor * a * a, m01, m02), (m01, m11 + factor * b * b, m12), (m02, m12, m22 + factor * c * c)


def _inverse(m: Matrix) -> Matrix:
    """Of a positive definite `m`, by L·D·Lᵀ; its pivots stay above rounding, so there is one whatever was measured."""
    (m00, m01, m02), (_, m11, m12), (_, _, m22) = m
    a, b = m01 / m00, m02 / m00
    d1 = max(m11 - a * m01, _ROUNDING * m11)
    c = (m12 - a * m02) / d1
    d2 = max(m22 - b * m02 - c * c * d1, _ROUNDING * m22)
    b = a * c - b  # L⁻¹ is (1, 0, 0), (−a, 1, 0), (b, −c, 1)
    i01, i02, i12 = -a / d1 - b * c / d2, b / d2, -c / d2
    return (1 / m00 + a * a / d1 + b * b / d2, i01, i02), (i01, 1 / d1 + c * c / d2, i12), (i02, i12, 1 / d2)
