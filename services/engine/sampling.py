"""From logits to token ids.

Penalties and bias change the logits (`penalties`). The filters then apply in this order: temperature → top_k → top_p →
min_p, each on what the one before has left. Then one uniform number is drawn and the inverse of the cumulative
distribution gives the token.

The number comes from Philox, a counter-based generator, keyed by the request's seed and counted by the token's
position. It depends on nothing else: the same request draws the same numbers alone, in a batch, after a recompute, or
on another worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from services.engine import penalties
from services.engine.errors import NonFiniteLogits
from services.engine.sampling_spec import History, SamplingSpec

__all__ = ["History", "Logits", "SamplingSpec", "sample", "uniform"]

Logits: TypeAlias = torch.Tensor
"""Float32 (rows, vocab): the name for those who hand logits on and know no torch."""

# Candidates looked at first for a row with top_p and no top_k. Fixed: a row's arithmetic depends on the row alone.
_NUCLEUS_CANDIDATES = 1024


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that the token at `position` of a request with `seed` is drawn with."""
    # The position sits in the second counter word: 2^64 numbers are free at each position.
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[0, position, 0, 0])).random())


def sample(
    logits: torch.Tensor,
    specs: Sequence[SamplingSpec],
    positions: Sequence[int],
    histories: Sequence[History | None] | None = None,
) -> list[int]:
    """One token per row of `logits` (n, vocab), which stay as they are.

    `positions[i]` is the number of tokens before the sampled one, prompt included; `histories[i]` are these tokens,
    which may be None where the spec does not read them. Raises NonFiniteLogits, naming the rows, rather than return a
    token that means nothing.
    """
    histories = [None] * len(specs) if histories is None else histories
    if not len(logits) == len(specs) == len(positions) == len(histories):
        raise ValueError(
            f"{len(logits)} rows of logits, {len(specs)} specs, {len(positions)} positions, {len(histories)} histories"
        )
    if not specs:
        return []
    _require_finite(logits)
    batch = _Batch(specs=specs, positions=positions)
    changed = [row for row, spec in enumerate(specs) if spec.changes_logits]
    tokens = _choose(logits, batch, without=frozenset(changed))
    if changed:
        index = torch.tensor(changed, device=logits.device)
        own = logits[index]
        penalties.change(own, batch.at(changed).specs, [histories[row] for row in changed])
        tokens[index] = _choose(own, batch.at(changed))
    return [int(token) for token in tokens.tolist()]


def _choose(logits: torch.Tensor, batch: _Batch, *, without: frozenset[int] = frozenset()) -> torch.Tensor:
    """Token ids (n,); those of the rows `without` mean nothing."""
    tokens = logits.argmax(dim=-1)
    groups: dict[_Candidates, list[int]] = {}
    for row, spec in enumerate(batch.specs):
        if spec.temperature > 0 and row not in without:
            groups.setdefault(_candidates(spec, logits.shape[1]), []).append(row)
    for candidates, rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = _draw(logits[index], batch.at(rows), candidates)
    return tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidates:
    """The most probable tokens that a row looks at. Rows that look alike are drawn together."""

    count: int  # 0: all of them, in vocabulary order
    exact: bool  # no token beyond them can be drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    specs: Sequence[SamplingSpec]
    positions: Sequence[int]

    def column(self, values: Sequence[float], device: torch.device) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    def at(self, rows: Sequence[int]) -> _Batch:
        return _Batch(specs=[self.specs[r] for r in rows], positions=[self.positions[r] for r in rows])


def _require_finite(logits: torch.Tensor) -> None:
    finite = torch.isfinite(logits).all(dim=-1)
    if not bool(finite.all()):
        raise NonFiniteLogits(tuple(int(row) for row in torch.nonzero(~finite).flatten().tolist()))


def _candidates(spec: SamplingSpec, vocab: int) -> _Candidates:
    if spec.top_k:
        return _Candidates(count=min(spec.top_k, vocab), exact=True)
    if spec.top_p < 1:
        return _Candidates(count=min(_NUCLEUS_CANDIDATES, vocab), exact=vocab <= _NUCLEUS_CANDIDATES)
    return _Candidates(count=0, exact=True)


def _draw(logits: torch.Tensor, batch: _Batch, candidates: _Candidates) -> torch.Tensor:
    """Token ids (n,) for rows that look at the same candidates. Computed in float64."""
    device = logits.device
    probabilities = _softmax(logits, batch.column([s.temperature for s in batch.specs], device))
    order: torch.Tensor | None = None
    top_p = batch.column([s.top_p for s in batch.specs], device)
    if candidates.count:
        probabilities, order = probabilities.topk(candidates.count, dim=-1)
    short = probabilities.sum(dim=-1) < top_p[:, 0]
    if candidates.exact:
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    if order is not None:
        probabilities = _cut_nucleus(probabilities, top_p)
    floor = batch.column([s.min_p for s in batch.specs], device) * probabilities.amax(dim=-1, keepdim=True)
    probabilities = torch.where(probabilities < floor, 0.0, probabilities)
    numbers = [uniform(spec.seed, position) for spec, position in zip(batch.specs, batch.positions, strict=True)]
    chosen = _invert(probabilities, batch.column(numbers, device))
    if order is not None:
        chosen = order.gather(1, chosen[:, None])[:, 0]
    if not candidates.exact and bool(short.any()):
        # Rows whose nucleus is wider than the candidates, and only they: a row's arithmetic must not follow its batch.
        rows = torch.nonzero(short)[:, 0]
        everything = _Candidates(count=logits.shape[1], exact=True)
        chosen[rows] = _draw(logits[rows], batch.at(rows.tolist()), everything)
    return chosen


def _softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    # The maximum goes first: a temperature near zero then underflows to a certain choice instead of overflowing.
    wide = logits.double()
    return torch.softmax((wide - wide.amax(dim=-1, keepdim=True)) / temperature, dim=-1)


def _cut_nucleus(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to 0 what lies after the smallest set that reaches top_p. Rows in descending order."""
    before = probabilities.cumsum(dim=-1) - probabilities
    # A top_p of 1 is off: rounding in `before` must not cut the tail.
    return torch.where((before < top_p) | (top_p >= 1), probabilities, 0.0)


def _invert(probabilities: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Index (n,) of the first place where the cumulative sum passes `numbers` × the row's total."""
    cumulative = probabilities.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)[:, 0]
    size = probabilities.shape[1]
    if bool((index == size).any()):
        # number × total may round up to the total: then the last token that has a probability is meant.
        last = size - 1 - (probabilities > 0).flip(1).to(torch.int8).argmax(dim=-1)
        index = torch.where(index == size, last, index)
    return index
