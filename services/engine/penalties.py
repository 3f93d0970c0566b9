"""What requests change about the model's logits before a token is chosen: penalties and bias.

In this order, each on what the one before has left:
    repetition_penalty r   over tokens of prompt and answer: positive logits / r, negative logits × r (Keskar et al.
                           2019, CTRL, section 4.1; the sign rule is that of transformers)
    presence_penalty p,    over tokens of the answer that stand in it c times: − c · f − p (OpenAI's API reference)
    frequency_penalty f
    logit_bias             + bias

All rows at once, over (row, token) pairs: the vocabulary is never walked. Each pair's arithmetic is its own, so a row
comes out the same in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from services.engine.sampling_spec import History, SamplingSpec

Pairs = NDArray[np.int64]  # row * vocab + token id, ascending, each once


def change(logits: torch.Tensor, specs: Sequence[SamplingSpec], histories: Sequence[History | None]) -> None:
    """Apply to `logits` (n, vocab), in place. ValueError where a spec reads a history that is missing."""
    for spec, history in zip(specs, histories, strict=True):
        if spec.reads_history and history is None:
            raise ValueError("penalties need the tokens before the sampled one")
    flat, vocab = logits.view(-1), logits.shape[1]
    _repetition(flat, vocab, specs, histories)
    _presence_and_frequency(flat, vocab, specs, histories)
    _bias(flat, vocab, specs)


def _repetition(
    flat: torch.Tensor, vocab: int, specs: Sequence[SamplingSpec], histories: Sequence[History | None]
) -> None:
    wanted = {r: h.token_ids for r, h in enumerate(histories) if h is not None and specs[r].repetition_penalty != 1}
    pairs, _ = _count(wanted, vocab)
    if not len(pairs):
        return
    index = torch.from_numpy(pairs).to(flat.device)
    penalty = _values([spec.repetition_penalty for spec in specs], pairs // vocab, flat)
    old = flat[index]
    # A penalty near zero must not overflow to an infinite logit.
    flat[index] = torch.where(old < 0, old * penalty, old / penalty).clamp(*_finite(flat))


def _presence_and_frequency(
    flat: torch.Tensor, vocab: int, specs: Sequence[SamplingSpec], histories: Sequence[History | None]
) -> None:
    wanted = {
        r: h.answer
        for r, h in enumerate(histories)
        if h is not None and (specs[r].presence_penalty or specs[r].frequency_penalty)
    }
    pairs, counts = _count(wanted, vocab)
    if not len(pairs):
        return
    rows = pairs // vocab
    frequency = _values([spec.frequency_penalty for spec in specs], rows, flat)
    presence = _values([spec.presence_penalty for spec in specs], rows, flat)
    times = torch.from_numpy(counts).to(flat.device, flat.dtype)
    flat[torch.from_numpy(pairs).to(flat.device)] -= times * frequency + presence


def _bias(flat: torch.Tensor, vocab: int, specs: Sequence[SamplingSpec]) -> None:
    pairs = [(row * vocab + token_id, bias) for row, spec in enumerate(specs) for token_id, bias in spec.logit_bias]
    if not pairs:
        return
    index = torch.tensor([pair for pair, _ in pairs], device=flat.device)
    flat[index] += torch.tensor([bias for _, bias in pairs], dtype=flat.dtype, device=flat.device)


def _count(tokens: dict[int, Sequence[int]], vocab: int) -> tuple[Pairs, Pairs]:
    """The different (row, token) pairs of each row's tokens, and how often each stands there."""
    pairs = [np.asarray(ids, dtype=np.int64) + row * vocab for row, ids in tokens.items() if ids]
    if not pairs:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    found, counts = np.unique(np.concatenate(pairs), return_counts=True)
    return found, counts.astype(np.int64)


def _values(of_rows: Sequence[float], rows: Pairs, like: torch.Tensor) -> torch.Tensor:
    """A row's value for each pair."""
    return torch.tensor(of_rows, dtype=like.dtype, device=like.device)[torch.from_numpy(rows).to(like.device)]


def _finite(like: torch.Tensor) -> tuple[float, float]:
    limits = torch.finfo(like.dtype)
    return limits.min, limits.max
