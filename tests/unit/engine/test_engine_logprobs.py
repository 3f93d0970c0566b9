"""Log-probabilities against a float64 log-softmax of NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.errors import NonFiniteLogits
from services.engine.logprobs import token_logprobs
from services.engine.sampling_spec import MAX_LOGPROBS, TokenLogprobs

VOCAB = 400


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 4


def oracle(logits: torch.Tensor) -> np.ndarray:
    wide = logits.numpy().astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(0, MAX_LOGPROBS)), max_size=40), st.integers(0, 9))
def test_they_are_the_log_softmax_with_the_best_tokens_first(asked: list[tuple[int, int]], seed: int) -> None:
    logits = logits_of(len(asked), seed=seed)
    found = token_logprobs(logits, [token for token, _ in asked], [count for _, count in asked])
    expected = oracle(logits)
    assert len(found) == len(asked)
    for row, (token, count) in enumerate(asked):
        order = np.argsort(-expected[row], kind="stable")[:count]
        assert found[row].top_ids == tuple(order.tolist())
        np.testing.assert_allclose(found[row].logprob, expected[row, token], rtol=1e-12)
        np.testing.assert_allclose(found[row].top_logprobs, expected[row, order], rtol=1e-12)
        assert token_logprobs(logits[row : row + 1], [token], [count]) == [found[row]], "a row depends on its batch"


def test_a_vocabulary_smaller_than_the_alternatives_gives_all_of_it() -> None:
    (found,) = token_logprobs(logits_of(1, vocab=3), [0], [MAX_LOGPROBS])
    assert sorted(found.top_ids) == [0, 1, 2]
    assert sum(np.exp(found.top_logprobs)) == pytest.approx(1.0)


def test_extreme_logits_give_finite_values() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0]])
    assert token_logprobs(logits, [0], [0]) == [TokenLogprobs(0.0)]
    assert np.isfinite(token_logprobs(logits, [1], [0])[0].logprob)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_named(bad: float) -> None:
    logits = logits_of(40)
    logits[2, 5] = logits[33, 0] = bad
    with pytest.raises(NonFiniteLogits) as error:
        token_logprobs(logits, [0] * 40, [1] * 40)
    assert error.value.rows == (2, 33)
