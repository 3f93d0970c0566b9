"""How long a worker computes: what its membership says, and what scheduling and simulation predict with.

The forms are DistServe's (Zhong et al., OSDI 2024, appendix on the latency model), with lengths and contexts in tokens:

    prefill = a + b·Σl + c·Σl²         a prompt's tokens go through every matrix, each of them looks at all before it
    step    = a + b·Σcontext + c·batch  the weights are read once, the KV of every context once, each row is computed

A prompt that is computed in chunks [start, end) contributes end − start and end² − start² to its steps: they add up to
l and l², and only the constant is paid once a step. What FastServe calls the first step's time is `prompt_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillFit:
    """Steps that compute prompts. ValueError for coefficients that no worker has."""

    a_s: float  # s a step
    b_s: float  # s a token
    c_s: float  # s a token²
    chunk_tokens: int  # the most prompt tokens that this worker computes in one step
    error: float  # median of |predicted − measured| ÷ measured, of recent steps predicted before they were learned from
    steps: int  # how many were learned from

    def __post_init__(self) -> None:
        """Refuses what is no fit."""
        _check_times(a_s=self.a_s, b_s=self.b_s, c_s=self.c_s, error=self.error)
        _check_counts(steps=self.steps, chunk_tokens=self.chunk_tokens)
        if self.chunk_tokens < 1:
            raise ValueError("chunk_tokens: 0 is less than 1")

    def step_s(self, *, tokens: int, squares: int) -> float:
        """One step over chunks [start, end): `tokens` is Σ(end − start), `squares` is Σ(end² − start²)."""
        return self.a_s + self.b_s * tokens + self.c_s * squares

    def prompt_s(self, tokens: int, *, cached_tokens: int = 0) -> float:
        """A whole prompt by itself, of which the KV of the first `cached_tokens` is there already."""
        computed = tokens - cached_tokens
        steps = -(-computed // self.chunk_tokens)
        return self.a_s * steps + self.b_s * computed + self.c_s * (tokens**2 - cached_tokens**2)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFit:
    """Steps that decode one token of every request in them. ValueError for coefficients that no worker has."""

    a_s: float  # s a step
    b_s: float  # s a token of context
    c_s: float  # s a request
    error: float  # see PrefillFit
    steps: int  # how many were learned from

    def __post_init__(self) -> None:
        """Refuses what is no fit."""
        _check_times(a_s=self.a_s, b_s=self.b_s, c_s=self.c_s, error=self.error)
        _check_counts(steps=self.steps)

    def step_s(self, *, context_tokens: int, batch: int) -> float:
        """One step of `batch` requests that see `context_tokens` in all, their new tokens included."""
        return self.a_s + self.b_s * context_tokens + self.c_s * batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """What a worker knows of its own speed. None: it has not computed enough of the kind to say."""

    prefill: PrefillFit | None = None
    step: StepFit | None = None

    def mixed_step_s(self, *, tokens: int, squares: int, context_tokens: int, batch: int) -> float | None:
        """A step with chunks beside decoding rows (see the fits' `step_s`); None until both kinds are known.

        What each kind costs, with one of the constants paid once: the weights are read for all rows together.
        """
        if self.prefill is None or self.step is None:
            return None
        apart_s = self.prefill.step_s(tokens=tokens, squares=squares) + self.step.step_s(
            context_tokens=context_tokens, batch=batch
        )
        return apart_s - min(self.prefill.a_s, self.step.a_s)


def latency_from(fields: object) -> Latency:
    """Reads what `dataclasses.asdict` made of a Latency; None is an empty one. ValueError names what is wrong."""
    if fields is None:
        return Latency()
    if not isinstance(fields, Mapping):
        raise ValueError("latency: not a record")
    prefill, step = fields.get("prefill"), fields.get("step")
    return Latency(
        prefill=None if prefill is None else _prefill_from(prefill), step=None if step is None else _step_from(step)
    )


def _prefill_from(fields: object) -> PrefillFit:
    return PrefillFit(
        a_s=_number(fields, "a_s"),
        b_s=_number(fields, "b_s"),
        c_s=_number(fields, "c_s"),
        chunk_tokens=_count(fields, "chunk_tokens"),
        error=_number(fields, "error"),
        steps=_count(fields, "steps"),
    )


def _step_from(fields: object) -> StepFit:
    return StepFit(
        a_s=_number(fields, "a_s"),
        b_s=_number(fields, "b_s"),
        c_s=_number(fields, "c_s"),
        error=_number(fields, "error"),
        steps=_count(fields, "steps"),
    )


def _number(fields: object, name: str) -> float:
    value = fields.get(name) if isinstance(fields, Mapping) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"latency: {name}: {value!r} is not a number")
    return float(value)


def _count(fields: object, name: str) -> int:
    value = fields.get(name) if isinstance(fields, Mapping) else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"latency: {name}: {value!r} is not a count")
    return value


def _check_times(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: {value} is not a finite number ≥ 0")


def _check_counts(**values: int) -> None:
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name}: {value} is negative")
