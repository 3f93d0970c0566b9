"""Who decides how KV is encoded: both, and the measurement."""

from __future__ import annotations

import pytest

from kvtransfer.compression import PLAIN_ONLY, Allowed, allow, choose

SLOW, FAST, PRODUCED = 50e6, 200e6, 100e6


@pytest.mark.parametrize(
    ("receiver", "sender", "link", "produced", "chosen"),
    [
        ("off", "off", SLOW, PRODUCED, "plain"),
        ("int8", "off", SLOW, PRODUCED, "plain"),
        ("off", "int8", SLOW, PRODUCED, "plain"),
        ("off", "auto", SLOW, PRODUCED, "plain"),
        ("int8", "int8", FAST, PRODUCED, "int8"),
        ("fp8", "fp8", 0.0, 0.0, "fp8"),
        ("int8", "fp8", SLOW, PRODUCED, "plain"),
        ("auto", "auto", SLOW, PRODUCED, "int8"),
        ("auto", "auto", FAST, PRODUCED, "plain"),
        ("auto", "auto", PRODUCED, PRODUCED, "plain"),
        ("auto", "auto", 0.0, PRODUCED, "plain"),
        ("auto", "auto", SLOW, 0.0, "plain"),
        ("fp8", "auto", SLOW, PRODUCED, "fp8"),
        ("fp8", "auto", FAST, PRODUCED, "plain"),
        ("auto", "fp8", SLOW, PRODUCED, "fp8"),
        ("auto", "fp8", FAST, PRODUCED, "plain"),
    ],
)
def test_an_encoding_is_used_where_both_want_it_and_auto_only_where_the_link_is_known_to_be_slower(
    receiver, sender, link: float, produced: float, chosen: str
) -> None:
    assert choose(sender, allow(receiver, link), produced) == chosen


def test_a_receiver_that_says_nothing_gets_plain_kv() -> None:
    assert allow("off", SLOW) == PLAIN_ONLY == Allowed()
    assert choose("int8", PLAIN_ONLY, PRODUCED) == "plain"


@pytest.mark.parametrize("bandwidth", [-1.0, float("nan")])
def test_a_bandwidth_that_is_none_is_refused(bandwidth: float) -> None:
    with pytest.raises(ValueError, match="link_bytes_per_s"):
        Allowed(link_bytes_per_s=bandwidth)
