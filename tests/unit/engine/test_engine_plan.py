from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.engine.errors import InvalidSlice
from services.engine.plan import Slice, StepPlan, group_singles, plan_step

BLOCK = 4


def plan(*slices: Slice) -> StepPlan:
    return plan_step(slices, block_tokens=BLOCK, blocks=100, vocab=1000)


def part(tokens: int, start: int, blocks: Sequence[int], wants_logits: bool = True) -> Slice:
    return Slice(token_ids=range(tokens), start=start, blocks=blocks, wants_logits=wants_logits)


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("start", [0, 1, BLOCK, BLOCK + 1])
def test_every_token_is_written_where_its_block_table_says(tokens: int, start: int) -> None:
    blocks = [7, 3, 9, 1, 50]
    result = plan(part(tokens, start, blocks))
    expected = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, start + tokens)]
    assert result.write_slots.tolist() == expected
    assert result.positions.tolist() == list(range(start, start + tokens))


def test_logit_rows_are_the_last_rows_of_the_slices_that_want_them() -> None:
    result = plan(part(3, 0, [0]), part(1, 5, [1, 2]), part(2, 0, [3], wants_logits=False), part(4, 0, [4]))
    assert result.logit_rows.tolist() == [2, 3, 9]


def test_all_rows_of_a_slice_that_wants_all_its_logits_are_logit_rows_in_order() -> None:
    def whole(tokens: int, wants_logits: bool) -> Slice:
        return Slice(
            token_ids=range(tokens), start=0, blocks=[10 + tokens], wants_logits=wants_logits, wants_all_logits=True
        )

    slices = (whole(3, False), part(1, 5, [1, 2]), whole(2, True), part(2, 0, [7], wants_logits=False), whole(1, True))
    result = plan(*slices)
    assert result.logit_rows.tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert [s.logit_count for s in slices] == [3, 1, 2, 0, 1]


def test_chunks_and_single_tokens_are_told_apart_and_keep_their_rows() -> None:
    result = plan(part(3, 2, [6, 5]), part(1, 5, [1, 2]), part(1, 0, [3]))
    (chunk,) = result.chunks
    assert (chunk.row, chunk.tokens, chunk.slots.tolist()) == (0, 3, [24, 25, 26, 27, 20])
    singles = result.singles
    assert singles is not None
    assert (singles.rows.tolist(), singles.lengths.tolist()) == ([3, 4], [6, 1])
    assert (singles.tables.tolist(), singles.starts.tolist()) == ([1, 2, 3], [0, 2])


def test_single_tokens_are_padded_with_their_own_first_slot_to_less_than_twice_their_length() -> None:
    lengths = [1, 2, 3, 5, 8, 9, 17]
    slices = [part(1, n - 1, range(6 * i, 6 * i + 6)) for i, n in enumerate(lengths)]
    seen = {}
    singles = plan(*slices).singles
    assert singles is not None
    for group in group_singles(singles, BLOCK):
        for row, length, slots in zip(group.rows.tolist(), group.lengths.tolist(), group.slots.tolist(), strict=True):
            first = 6 * row * BLOCK
            assert slots[:length] == list(range(first, first + length))
            assert set(slots[length:]) <= {first}
            assert len(slots) < 2 * length or length == 1 == len(slots)
            seen[row] = length
    assert seen == dict(enumerate(lengths))


@pytest.mark.parametrize(
    "bad",
    [
        part(0, 0, [0]),
        part(1, -1, [0]),
        part(BLOCK + 1, 0, [0]),
        part(1, BLOCK, [0]),
        part(1, 0, []),
        part(1, 0, [100]),
        part(1, 0, [-1]),
        Slice(token_ids=[1000], start=0, blocks=[0], wants_logits=True),
        Slice(token_ids=[-1], start=0, blocks=[0], wants_logits=True),
    ],
    ids=repr,
)
def test_tokens_and_blocks_that_do_not_fit_are_refused(bad: Slice) -> None:
    with pytest.raises(InvalidSlice):
        plan(bad)


def test_two_tokens_never_share_a_place() -> None:
    with pytest.raises(InvalidSlice, match="same place"):
        plan(part(2, 0, [5]), part(1, 1, [5]))
    plan(part(2, 0, [5]), part(1, BLOCK, [5, 6]))  # a shared prefix block that nobody writes twice is fine
