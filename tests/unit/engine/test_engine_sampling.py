from __future__ import annotations

import numpy as np
import pytest
import torch

from services.engine.errors import NonFiniteLogits
from services.engine.sampling import SamplingSpec, sample, uniform

VOCAB = 3000  # wider than the candidates that are looked at first


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * spread


def oracle(logits: np.ndarray, spec: SamplingSpec) -> np.ndarray:
    """The distribution to draw from, token by token in float64."""
    scaled = logits.astype(np.float64) / spec.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = order[: spec.top_k] if spec.top_k else order
    total = p[keep].sum()
    nucleus, mass = [], 0.0
    for token in keep:
        if mass >= spec.top_p:
            break
        nucleus.append(token)
        mass += p[token] / total
    kept = [token for token in nucleus if p[token] >= spec.min_p * p[order[0]]]
    result = np.zeros_like(p)
    result[kept] = p[kept]
    return result / result.sum()


SPECS = [
    SamplingSpec(temperature=1.0),
    SamplingSpec(temperature=0.6, top_k=5),
    SamplingSpec(temperature=1.0, top_p=0.5),
    SamplingSpec(temperature=2.0, top_p=0.99),
    SamplingSpec(temperature=1.0, min_p=0.1),
    SamplingSpec(temperature=1.3, top_k=40, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_draws_follow_the_filtered_softmax(spec: SamplingSpec) -> None:
    """Chi-square over 12,000 draws. The limit is far above the statistic of any right sampler (5 sigma), and a filter
    in the wrong order moves whole tokens in or out, which a forbidden token shows at once."""
    draws, vocab = 12_000, 60
    logits = logits_of(1, vocab, seed=3)
    specs = [SamplingSpec(**{f: getattr(spec, f) for f in ("temperature", "top_p", "top_k", "min_p")}, seed=11)] * draws
    tokens = sample(logits.expand(draws, vocab), specs, range(draws))
    expected = oracle(logits[0].numpy(), spec) * draws
    observed = np.bincount(tokens, minlength=vocab)
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    statistic = ((observed[common] - expected[common]) ** 2 / expected[common]).sum()
    freedom = max(1, common.sum() - 1)
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_draw_is_the_inverse_of_the_cumulative_distribution_over_a_wide_vocabulary(spec: SamplingSpec) -> None:
    logits = logits_of(1, seed=5)
    allowed = oracle(logits[0].numpy(), spec)
    tokens = sample(logits.expand(300, VOCAB), [spec] * 300, range(300))
    assert all(allowed[token] > 0 for token in tokens)
    assert len(set(tokens)) > 1


def test_zero_temperature_is_the_most_probable_token() -> None:
    logits = logits_of(8)
    assert sample(logits, [SamplingSpec(seed=s) for s in range(8)], range(8)) == logits.argmax(dim=-1).tolist()


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = logits_of(4, spread=50)
    specs = [SamplingSpec(temperature=1e-6)] * 4
    assert sample(logits, specs, range(4)) == logits.argmax(dim=-1).tolist()


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = logits_of(4)
    specs = [SamplingSpec(temperature=2.0, top_k=1)] * 4
    assert sample(logits, specs, range(4)) == logits.argmax(dim=-1).tolist()


def test_a_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = logits_of(50, 20)
    wide = sample(logits, [SamplingSpec(temperature=1.0, top_k=1000)] * 50, range(50))
    assert len(set(wide)) > 5


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    """Rows of all kinds, flat and peaked, so that some nuclei are wider than the first candidates and some are not."""
    kinds = [
        *SPECS,
        SamplingSpec(),
        SamplingSpec(temperature=1.0, top_k=1024),
        SamplingSpec(temperature=5.0, top_p=0.95),
    ]
    rows = 4 * len(kinds)
    logits = logits_of(rows) * torch.linspace(0.1, 3.0, rows)[:, None]
    specs = [
        SamplingSpec(temperature=k.temperature, top_p=k.top_p, top_k=k.top_k, min_p=k.min_p, seed=2**64 - 1 - i)
        for i, k in enumerate(kinds * 4)
    ]
    positions = [17 * i for i in range(rows)]
    together = sample(logits, specs, positions)
    assert together == [sample(logits[i : i + 1], [specs[i]], [positions[i]])[0] for i in range(rows)]
    backwards = sample(logits.flip(0), specs[::-1], positions[::-1])
    assert together == backwards[::-1]


def test_the_random_number_depends_on_seed_and_position_alone() -> None:
    numbers = [uniform(seed, position) for seed in range(40) for position in range(40)]
    assert numbers == [uniform(seed, position) for seed in range(40) for position in range(40)]
    assert len(set(numbers)) == len(numbers)
    assert 0.45 < float(np.mean(numbers)) < 0.55
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_raise_and_name_their_rows(bad: float) -> None:
    logits = logits_of(4)
    logits[1, 7] = bad
    logits[3, 0] = bad
    with pytest.raises(NonFiniteLogits) as error:
        sample(logits, [SamplingSpec(), SamplingSpec(temperature=1.0)] * 2, range(4))
    assert error.value.rows == (1, 3)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty((0, VOCAB)), [], []) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", tuple((token, 1.0) for token in range(301))),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.0),
        ("min_p", -0.1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_value_out_of_range_names_itself(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingSpec(**{field: value})
