"""Penalties and bias against transformers' processors and against OpenAI's formula, token by token."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from services.engine.penalties import change
from services.engine.sampling import sample
from services.engine.sampling_spec import History, SamplingSpec

VOCAB = 50


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3


def changed(logits: torch.Tensor, specs: list[SamplingSpec], histories: list[History | None]) -> torch.Tensor:
    own = logits.clone()
    change(own, specs, histories)
    return own


def oracle(logits: list[float], spec: SamplingSpec, history: History) -> list[float]:
    """The whole definition in Python's own floats."""
    seen, counts, bias = set(history.token_ids), Counter(history.answer), dict(spec.logit_bias)
    result = []
    for token, value in enumerate(logits):
        if token in seen:
            value = value * spec.repetition_penalty if value < 0 else value / spec.repetition_penalty
        if token in counts:
            value -= counts[token] * spec.frequency_penalty + spec.presence_penalty
        result.append(value + bias.get(token, 0.0))
    return result


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=40)
penalty = st.floats(-2, 2, width=32)
specs = st.builds(
    SamplingSpec,
    repetition_penalty=st.floats(0.125, 8, width=32),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5).map(
        lambda biases: tuple(biases.items())
    ),
)
histories = st.builds(
    lambda prompt, answer: History(token_ids=prompt + answer, prompt_tokens=len(prompt)), tokens.filter(bool), tokens
)


@settings(deadline=None)
@given(st.lists(st.tuples(specs, histories), min_size=1, max_size=5), st.integers(0, 99))
def test_every_logit_is_changed_as_defined_and_none_that_was_not_asked_for(
    rows: list[tuple[SamplingSpec, History]], seed: int
) -> None:
    logits = logits_of(len(rows), seed)
    own = changed(logits, [spec for spec, _ in rows], [history for _, history in rows])
    expected = [oracle(logits[row].tolist(), *rows[row]) for row in range(len(rows))]
    torch.testing.assert_close(own.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-4)
    untouched = logits.double() == torch.tensor(expected, dtype=torch.float64)
    assert torch.equal(own[untouched], logits[untouched])
    for row, (spec, history) in enumerate(rows):
        assert torch.equal(changed(logits[row : row + 1], [spec], [history])[0], own[row]), "a row depends on its batch"


@pytest.mark.parametrize("value", [0.3, 1.1, 1.3, 2.0, 7.0])
def test_repetition_is_bit_for_bit_what_transformers_does(value: float) -> None:
    ids = [3, 3, 9, 0, VOCAB - 1, 9]
    logits = logits_of(4)
    theirs = RepetitionPenaltyLogitsProcessor(value)(torch.tensor([ids] * 4), logits.clone())
    spec, history = SamplingSpec(repetition_penalty=value), History(token_ids=ids, prompt_tokens=4)
    assert torch.equal(changed(logits, [spec] * 4, [history] * 4), theirs)


def test_the_prompt_counts_for_repetition_alone() -> None:
    logits = torch.ones((1, VOCAB))
    spec = SamplingSpec(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    own = changed(logits, [spec], [History(token_ids=[1, 1, 2, 2, 2], prompt_tokens=3)])[0]
    assert own[:3].tolist() == [1.0, 0.5, 0.5 - 2 * 0.25 - 0.5]


def test_an_extreme_penalty_leaves_finite_logits() -> None:
    logits = torch.tensor([[3.0, -3.0, 0.0]])
    for value in (1e-38, 1e38):
        own = changed(logits, [SamplingSpec(repetition_penalty=value)], [History(token_ids=[0, 1, 2], prompt_tokens=3)])
        assert bool(torch.isfinite(own).all())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_forces_or_forbids_a_token_in_its_own_row_only(temperature: float) -> None:
    logits = logits_of(3)
    best = logits.argmax(dim=-1).tolist()
    forced = SamplingSpec(temperature=temperature, logit_bias=((7, 100.0),))
    forbidden = SamplingSpec(temperature=temperature, logit_bias=((best[1], -100.0),))
    before = logits.clone()
    chosen = sample(logits, [forced, forbidden, SamplingSpec()], [1, 1, 1])
    assert chosen[0] == 7 and chosen[1] != best[1] and chosen[2] == best[2]
    assert torch.equal(logits, before), "log-probabilities are those of the logits as they were"


def test_penalties_without_the_tokens_so_far_are_an_error() -> None:
    with pytest.raises(ValueError, match="tokens before"):
        sample(logits_of(1), [SamplingSpec(presence_penalty=1.0)], [1])


def test_a_row_with_penalties_draws_the_same_alone_and_beside_rows_without() -> None:
    rows = 12
    logits = logits_of(rows, seed=4)
    history = History(token_ids=list(range(20)), prompt_tokens=5)
    kinds = [
        SamplingSpec(temperature=1.0, seed=3),
        SamplingSpec(temperature=0.8, seed=4, repetition_penalty=1.5, top_p=0.9),
        SamplingSpec(temperature=1.2, seed=5, frequency_penalty=1.0, logit_bias=((1, 2.0),), top_k=20),
        SamplingSpec(presence_penalty=-1.0),
    ]
    specs = kinds * 3
    together = sample(logits, specs, range(rows), [history] * rows)
    assert together == [sample(logits[row : row + 1], [specs[row]], [row], [history])[0] for row in range(rows)]
