"""An offer with several receivers: when its blocks are released, and what the others are told."""

from __future__ import annotations

import pytest

from kvtransfer import Area, TransferAborted, TransferExpired, TransferUsed
from kvtransfer.claims import Claim, Claims
from kvtransfer.lease import Lease
from kvtransfer.offer import Offer
from kvtransfer.states import SendState

FIRST, SECOND, THIRD = (
    Claim(receiver=name, area=Area(layer_begin=0, layer_end=2, head_begin=head, head_end=head + 1))
    for head, name in enumerate("abc")
)


class Made:
    def __init__(self) -> None:
        self.released: list[str] = []
        claims = Claims(Area(layer_begin=0, layer_end=2, head_begin=0, head_end=3))
        lease = Lease.grant(10.0, self.clock)
        self.offer = Offer("t", 20, (0, 1), lease, lease, self.clock, self.released.append, claims)

    def clock(self) -> float:
        return 0.0


@pytest.fixture
def made() -> Made:
    return Made()


def test_it_is_sent_when_all_were_told_and_released_when_all_have_acknowledged(made):
    offer = made.offer
    for claim in (FIRST, SECOND, THIRD):
        offer.claim(claim)
    assert offer.claimed
    for claim in (FIRST, SECOND):
        offer.tell(claim)
        offer.acknowledge(claim)
    assert offer.state is SendState.SENDING
    offer.tell(THIRD)
    assert (offer.state, made.released) == (SendState.SENT, [])
    offer.acknowledge(THIRD)
    assert (offer.state, made.released) == (SendState.RELEASED, ["t"])


def test_it_waits_for_parts_that_nobody_has_asked_for_yet(made):
    offer = made.offer
    offer.claim(FIRST)
    offer.tell(FIRST)
    offer.acknowledge(FIRST)
    assert (offer.state, offer.claimed, made.released) == (SendState.SENDING, False, [])
    with pytest.raises(TransferUsed):
        offer.claim(FIRST)


def test_a_lost_pull_tells_the_others_and_the_last_of_them_releases(made):
    offer, told = made.offer, []
    for claim in (FIRST, SECOND):
        offer.claim(claim)
        offer.listen(lambda claim=claim: told.append(claim))
    offer.lose(FIRST, TransferExpired("late"))
    assert told == [FIRST, SECOND]
    assert isinstance(offer.lost, TransferAborted)
    assert "another receiver of t failed: late" in str(offer.lost)
    assert (offer.state, made.released) == (SendState.DRAINING, [])
    with pytest.raises(TransferAborted, match="late"):
        offer.claim(THIRD)
    offer.lose(FIRST, TransferAborted("again"))
    offer.lose(SECOND, offer.lost)
    offer.lose(SECOND, offer.lost)
    assert (offer.state, made.released) == (SendState.RELEASED, ["t"])
    assert "late" in str(offer.lost)


def test_one_that_fails_while_it_is_pulled_drains_first(made):
    offer = made.offer
    offer.claim(FIRST)
    offer.fail(TransferExpired("the lease ended"))
    offer.fail(TransferAborted("later"))
    assert (offer.state, made.released) == (SendState.DRAINING, [])
    with pytest.raises(TransferExpired, match="the lease ended"):
        offer.claim(SECOND)
    offer.lose(FIRST, TransferAborted("gone"))
    assert made.released == ["t"]
    offer.fail(TransferAborted("over"))
    assert made.released == ["t"]


def test_one_that_fails_when_its_last_pull_is_acknowledged_is_released_by_it(made):
    offer = made.offer
    offer.claim(FIRST)
    offer.tell(FIRST)
    offer.fail(TransferExpired("the lease ended"))
    offer.acknowledge(FIRST)
    assert made.released == ["t"]


def test_one_that_nobody_pulls_any_more_is_released_at_once_when_it_fails(made):
    offer = made.offer
    offer.claim(FIRST)
    offer.tell(FIRST)
    offer.acknowledge(FIRST)
    offer.fail(TransferExpired("the lease ended"))
    assert made.released == ["t"]
