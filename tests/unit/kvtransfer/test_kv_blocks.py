from __future__ import annotations

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer import BlockCounts, BlockPool, BlockState, BlockStateError, OutOfBlocks


def test_blocks_are_given_lowest_first_and_come_back():
    pool = BlockPool(8)
    assert pool.allocate(3, "a") == (0, 1, 2)
    assert pool.allocate(2, "b") == (3, 4)
    assert pool.free("a") == (0, 1, 2)
    assert pool.allocate(4, "c") == (0, 1, 2, 5)
    assert pool.extend("b", 1) == (6,)
    assert pool.blocks("b") == (3, 4, 6)
    pool.check()


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (1, 1), (4, 4)])
def test_up_to_the_last_block_is_given(asked, given):
    pool = BlockPool(4)
    assert len(pool.allocate(asked, "a")) == given
    assert pool.counts() == BlockCounts(total=4, free=4 - given, held=given, leased=0)


def test_one_block_too_many_gives_none():
    pool = BlockPool(4)
    pool.allocate(2, "a")
    assert pool.can_allocate(2)
    assert not pool.can_allocate(3)
    with pytest.raises(OutOfBlocks):
        pool.allocate(3, "b")
    with pytest.raises(OutOfBlocks):
        pool.extend("a", 3)
    assert pool.counts().free == 2
    assert pool.owners() == ("a",)


def test_leased_blocks_are_counted_apart():
    pool = BlockPool(4)
    pool.allocate(3, "a")
    pool.lease("a")
    assert pool.counts() == BlockCounts(total=4, free=1, held=0, leased=3)
    assert pool.state("a") is BlockState.LEASED


def test_draining_blocks_are_nobodys_until_drained():
    pool = BlockPool(4)
    pool.allocate(4, "a")
    pool.drain("a")
    assert pool.counts().held == 4
    assert not pool.can_allocate(1)
    with pytest.raises(BlockStateError, match="draining"):
        pool.free("a")
    assert pool.drained("a") == (0, 1, 2, 3)
    assert pool.can_allocate(4)


def test_wrong_uses_are_refused():
    pool = BlockPool(4)
    pool.allocate(1, "a")
    for wrong in (
        lambda: pool.allocate(1, "a"),
        lambda: pool.free("b"),
        lambda: pool.drained("a"),
        lambda: (pool.lease("a"), pool.lease("a")),
        lambda: pool.extend("a", 1),  # leased by now
    ):
        with pytest.raises(BlockStateError):
            wrong()
    with pytest.raises(ValueError, match="negative"):
        pool.allocate(-1, "c")


class Blocks(RuleBasedStateMachine):
    """Any sequence of calls keeps the accounts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)

    @rule(owner=st.sampled_from("abc"), blocks=st.integers(0, 6))
    def grow(self, owner: str, blocks: int) -> None:
        call = self.pool.extend if self.pool.state(owner) else lambda who, n: self.pool.allocate(n, who)
        with contextlib.suppress(OutOfBlocks, BlockStateError):
            assert len(call(owner, blocks)) == blocks

    @rule(owner=st.sampled_from("abc"), name=st.sampled_from(["lease", "free", "drain", "drained"]))
    def step(self, owner: str, name: str) -> None:
        before = self.pool.state(owner)
        legal = {
            "lease": {BlockState.HELD},
            "free": {BlockState.HELD, BlockState.LEASED},
            "drain": {BlockState.HELD, BlockState.LEASED},
            "drained": {BlockState.DRAINING},
        }
        try:
            getattr(self.pool, name)(owner)
            assert before in legal[name]
        except BlockStateError:
            assert before not in legal[name]

    @invariant()
    def accounts_are_right(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts.free + counts.held + counts.leased + counts.swapped == counts.total == 12


TestAnySequenceOfCalls = Blocks.TestCase
TestAnySequenceOfCalls.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def test_the_check_finds_what_is_wrong():
    pool = BlockPool(4)
    pool.allocate(2, "a")
    pool._holdings["a"].blocks[0] = 3
    with pytest.raises(BlockStateError):
        pool.check()
