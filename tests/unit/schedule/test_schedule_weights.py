"""Weights of tenants as they are set: what is not named has 1, what is wrong is named."""

from __future__ import annotations

import pytest

from services.schedule.weights import Weights, parse_weights


def test_none_is_set_by_default() -> None:
    assert parse_weights("") == Weights()
    assert Weights().of("anybody") == Weights().of("") == 1.0


def test_tenants_have_the_weight_that_was_set_and_others_1() -> None:
    weights = parse_weights("gold=2,a=b=0.5")
    assert [weights.of(name) for name in ("gold", "a=b", "a", "")] == [2.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gold", "'gold' is not of the form NAME=WEIGHT"),
        ("=2", "'=2' is not of the form NAME=WEIGHT"),
        ("gold=", "gold= is not a finite number > 0"),
        ("gold=much", "gold=much is not a finite number > 0"),
        ("gold=0", "gold=0 is not a finite number > 0"),
        ("a=1,gold=-1", "gold=-1 is not a finite number > 0"),
        ("gold=inf", "gold=inf is not a finite number > 0"),
        ("gold=nan", "gold=nan is not a finite number > 0"),
        ("gold=1,gold=2", "gold= is there twice"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        parse_weights(text)
