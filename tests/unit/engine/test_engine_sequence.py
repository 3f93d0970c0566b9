from __future__ import annotations

import pytest

from services.engine.sequence import TokenSequence, blocks_needed, finish_reason

BLOCK = 16


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (BLOCK - 1, 1), (BLOCK, 1), (BLOCK + 1, 2), (32, 2)])
def test_blocks_needed_is_the_smallest_number_that_holds_the_tokens(tokens: int, blocks: int) -> None:
    assert blocks_needed(tokens, BLOCK) == blocks


def test_a_sequence_ends_at_a_stop_token_or_at_its_length_and_the_stop_token_wins() -> None:
    assert finish_reason(5, 1, 3, (2,)) is None
    assert finish_reason(5, 3, 3, (2,)) == "length"
    assert finish_reason(2, 1, 3, (2,)) == "stop"
    assert finish_reason(2, 3, 3, (2,)) == "stop"
    assert finish_reason(2, 1, 3, ()) is None
    assert finish_reason(5, 1, 1, ()) == "length"


def test_slices_cover_the_prompt_once_and_only_the_last_wants_logits() -> None:
    sequence = TokenSequence(token_ids=list(range(10)), blocks=[4])
    seen: list[int] = []
    wanted = []
    while sequence.pending:
        part = sequence.next_slice(4)
        assert part.start == len(seen)
        seen.extend(part.token_ids)
        wanted.append(part.wants_logits)
        sequence.advance(len(part.token_ids))
    assert seen == list(range(10))
    assert wanted == [False, False, True]


def test_a_sampled_token_is_pending_until_it_is_computed() -> None:
    sequence = TokenSequence(token_ids=[1, 2], computed=2, blocks=[0])
    sequence.append(9)
    assert (sequence.pending, sequence.next_slice(100).token_ids, sequence.next_slice(100).start) == (1, (9,), 2)


@pytest.mark.parametrize(("tokens", "room", "missing"), [(1, 0, 1), (BLOCK, 0, 1), (BLOCK, 1, 2), (BLOCK + 1, 0, 2)])
def test_missing_blocks_count_the_tokens_and_the_room(tokens: int, room: int, missing: int) -> None:
    sequence = TokenSequence(token_ids=[0] * tokens)
    assert sequence.blocks_missing(BLOCK, room_tokens=room) == missing
    sequence.add_blocks(range(missing))
    assert sequence.blocks_missing(BLOCK, room_tokens=room) == 0


def test_nothing_pending_cannot_be_sliced_or_advanced() -> None:
    sequence = TokenSequence(token_ids=[1], computed=1)
    with pytest.raises(ValueError, match="nothing to slice"):
        sequence.next_slice(1)
    with pytest.raises(ValueError, match="cannot advance"):
        sequence.advance(1)
