"""Log-probabilities of tokens under the model: the log-softmax of its raw logits, before anything a request applies.

Computed in float64, a few rows at a time, so that a chunk of a prompt needs no second copy of its logits. The number of
alternatives that are looked for is fixed, as a row's result must not follow its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from services.engine.errors import NonFiniteLogits
from services.engine.sampling_spec import MAX_LOGPROBS, TokenLogprobs

_ROWS = 16  # of float64 logits at a time: 6 MB at a vocabulary of 50,000


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], alternatives: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of `logits` (n, vocab): its token's log-probability, and those of its best `alternatives[i]` tokens.

    Raises NonFiniteLogits, naming the rows.
    """
    if not len(logits) == len(token_ids) == len(alternatives):
        raise ValueError(f"{len(logits)} rows of logits, {len(token_ids)} tokens, {len(alternatives)} alternatives")
    finite = torch.isfinite(logits).all(dim=-1)
    if not bool(finite.all()):
        raise NonFiniteLogits(tuple(int(row) for row in torch.nonzero(~finite).flatten().tolist()))
    return [
        found
        for first in range(0, len(token_ids), _ROWS)
        for found in _few(
            logits[first : first + _ROWS], token_ids[first : first + _ROWS], alternatives[first : first + _ROWS]
        )
    ]


def _few(logits: torch.Tensor, token_ids: Sequence[int], alternatives: Sequence[int]) -> Iterator[TokenLogprobs]:
    everything = torch.log_softmax(logits.double(), dim=-1)
    chosen = everything.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    if not any(alternatives):
        yield from map(TokenLogprobs, chosen)
        return
    best = everything.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=-1)
    for logprob, ids, values, count in zip(
        chosen, best.indices.tolist(), best.values.tolist(), alternatives, strict=True
    ):
        yield TokenLogprobs(logprob, tuple(ids[:count]), tuple(values[:count]))
