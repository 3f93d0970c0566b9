"""Encoded KV on real text, with the embedded model; `python -m loadtest compression` says it for 200 prefixes."""

from __future__ import annotations

import pytest

from loadtest.compression import TOKENS, measure, tokenized
from services.engine.card import read_card
from services.engine.catalog import resolve

PREFIXES = 21
BOUNDS = {"int8": (0.03, 0.10, 0.95), "fp8": (0.08, 0.25, 0.90)}
"""Median and largest relative error of the logits at most, share of steps with the same greedy token at least."""


@pytest.mark.slow
def test_encoded_kv_moves_logits_by_little_and_greedy_choices_hardly_ever() -> None:
    folder = resolve("smollm2", progress=print).path
    plain, *encoded = measure(read_card(folder, "smollm2"), tokenized(folder), PREFIXES)
    assert (plain.error_max, plain.agreement, plain.texts, plain.bytes_ratio) == (0.0, 1.0, 1.0, 1.0)
    assert [row.encoding for row in encoded] == list(BOUNDS)
    said = "; ".join(
        f"{row.encoding}: {row.error_median:.4f}, {row.error_max:.4f}, {row.agreement:.3f}" for row in encoded
    )
    print(said, f"({PREFIXES} prefixes x {TOKENS} tokens)")
    for row in encoded:
        median, largest, agreement = BOUNDS[row.encoding]
        assert 0 < row.error_median <= median and row.error_max <= largest and row.agreement >= agreement, said
        assert 0.5 < row.bytes_ratio < 0.56
    assert encoded[0].error_median < encoded[1].error_median  # why auto takes int8
