"""How many workers a gateway waits for."""

from __future__ import annotations

import pytest

from services.errors import StartError
from services.gateway.config import GatewayConfig, parse_expected


@pytest.mark.parametrize(("text", "expected"), [(GatewayConfig().expect, (0, 1)), ("0:1", (0, 1)), ("12:3", (12, 3))])
def test_prefill_and_decode_workers_are_counted_apart(text: str, expected: tuple[int, int]) -> None:
    assert parse_expected(text) == expected


@pytest.mark.parametrize("text", ["", ":", "1", "1:", ":1", "1:0", "-1:1", "1:-1", "1:1:1", "a:1", "1.0:1", "1 :1"])
def test_what_is_no_such_pair_is_refused_by_name(text: str) -> None:
    with pytest.raises(StartError, match=r"expect: .*PREFILL:DECODE"):
        parse_expected(text)
