"""What a worker learns about its own speed, step by step: the fits of services.latency. Pure; no clock, no torch.

A step with chunks alone (slices of several tokens) is a prefill step, one of single tokens alone a decode step: what
counts is the shape of the work, not the stage of the request. A mixed step, chunks beside decoding rows, is learned
from by neither: the two fits added (`Latency.mixed_step_s`) predict it as well as a fit of its own, and either fit
would be bent by the other's costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.engine.plan import Slice
from services.latency import Latency, PrefillFit, StepFit
from services.worker.regression import Regression
from services.worker.work import Work


@dataclass(kw_only=True)
class LatencyModel:
    """Learns from every step of a worker whose steps hold at most `chunk_tokens` prompt tokens.

    `latency` is a new value after every step, so that another thread may read it.
    """

    chunk_tokens: int
    latency: Latency = field(default_factory=Latency, init=False)

    def __post_init__(self) -> None:
        """Prompts cost their tokens first of all, decode steps their reading of the weights."""
        chunk = float(self.chunk_tokens)
        self._prefill = Regression(scales=(1.0, chunk, chunk**2), doubts=(0.1, 1e-4, 0.1))
        self._step = Regression(scales=(1.0, 1024.0, 8.0), doubts=(1e-4, 0.1, 0.1))

    def observe(self, work: Sequence[Work], duration_s: float) -> None:
        """Takes in one computed step and how long it took."""
        chunks = [item.slice for item in work if len(item.slice.token_ids) > 1]
        if not chunks:
            context = sum([item.slice.start for item in work]) + len(work)
            self._step.learn((1, context, len(work)), duration_s)
        elif len(chunks) == len(work):
            self._prefill.learn(_prefill_features(chunks), duration_s)
        else:
            return
        self.latency = Latency(prefill=self._prefill_fit(), step=self._step_fit())

    def _prefill_fit(self) -> PrefillFit | None:
        known = self._prefill
        if not known.ready:
            return None
        a_s, b_s, c_s = known.coefficients
        return PrefillFit(
            a_s=a_s, b_s=b_s, c_s=c_s, chunk_tokens=self.chunk_tokens, error=known.error, steps=known.rows
        )

    def _step_fit(self) -> StepFit | None:
        known = self._step
        if not known.ready:
            return None
        a_s, b_s, c_s = known.coefficients
        return StepFit(a_s=a_s, b_s=b_s, c_s=c_s, error=known.error, steps=known.rows)


def _prefill_features(chunks: Iterable[Slice]) -> tuple[int, int, int]:
    """1, Σ(end − start), Σ(end² − start²)."""
    tokens = squares = 0
    for piece in chunks:
        length = len(piece.token_ids)
        tokens += length
        squares += length * (2 * piece.start + length)
    return 1, tokens, squares
