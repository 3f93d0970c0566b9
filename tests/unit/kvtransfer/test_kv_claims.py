from __future__ import annotations

import pytest

from kvtransfer import Area, TransferUsed
from kvtransfer.claims import Claim, Claims


def area(layer_begin: int, layer_end: int, head_begin: int, head_end: int) -> Area:
    return Area(layer_begin=layer_begin, layer_end=layer_end, head_begin=head_begin, head_end=head_end)


SHARD = area(10, 20, 2, 4)
WHOLE = Claim(receiver="a", area=SHARD)


def test_one_claim_of_everything_uses_an_offer_up():
    claims = Claims(SHARD)
    assert not claims.made
    claims.make(WHOLE)
    assert claims.made
    assert not claims.complete
    for receiver in ("a", "b"):
        with pytest.raises(TransferUsed):
            claims.make(Claim(receiver=receiver, area=SHARD))
    claims.acknowledge(WHOLE)
    assert claims.complete


def test_parts_are_complete_when_the_last_is_acknowledged():
    claims = Claims(SHARD)
    parts = [area(10, 20, 2, 3), area(10, 11, 3, 4), area(11, 20, 3, 4)]
    made = [Claim(receiver=f"r{i}", area=part) for i, part in enumerate(parts)]
    for claim in made:
        assert not claims.made
        claims.make(claim)
    assert claims.made
    for claim in made:
        assert not claims.complete
        claims.acknowledge(claim)
    assert claims.complete


@pytest.mark.parametrize("again", [area(19, 20, 3, 4), area(10, 11, 2, 3), SHARD])
def test_a_part_that_was_claimed_is_not_claimed_again_by_another(again):
    claims = Claims(SHARD)
    claims.make(Claim(receiver="a", area=area(10, 11, 2, 4)))
    claims.make(Claim(receiver="b", area=area(19, 20, 2, 4)))
    with pytest.raises(TransferUsed):
        claims.make(Claim(receiver="c", area=again))
    claims.make(Claim(receiver="c", area=area(11, 19, 2, 4)))  # the refused claim has taken nothing
    assert claims.made


def test_several_receivers_of_the_same_heads_take_as_many_times_as_was_said_and_none_twice():
    claims = Claims(SHARD, consumers=2)
    claims.make(WHOLE)
    with pytest.raises(TransferUsed, match="by a before"):
        claims.make(WHOLE)
    claims.acknowledge(WHOLE)
    assert not claims.complete
    other = Claim(receiver="b", area=SHARD)
    claims.make(other)
    with pytest.raises(TransferUsed, match="2 times before"):
        claims.make(Claim(receiver="c", area=SHARD))
    claims.acknowledge(other)
    assert claims.complete


@pytest.mark.parametrize("consumers", [0, -1])
def test_nobody_to_receive_is_refused(consumers):
    with pytest.raises(ValueError, match="consumers"):
        Claims(SHARD, consumers)
