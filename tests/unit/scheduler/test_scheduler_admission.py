"""Whether the head of the line may go."""

from __future__ import annotations

import pytest

from services.cluster.record import BlockCounts, WorkerRecord
from services.scheduler.admission import bound_tokens, counted_tokens, ever_fits, has_room, longest_tokens

WORKER = WorkerRecord(
    name="d",
    address="d:1",
    incarnation="i",
    role="decode",
    state="ready",
    model="m",
    fingerprint="f",
    context_tokens=100,
    block_tokens=16,
    blocks=BlockCounts(total=4, free=4),
)


@pytest.mark.parametrize(("tokens", "counted"), [(0, 0), (1, 16), (15, 16), (16, 16), (17, 32)])
def test_a_request_counts_in_whole_blocks(tokens: int, counted: int) -> None:
    assert counted_tokens(tokens, 0, 16) == counted
    assert counted_tokens(0, tokens, 16) == counted


def test_no_request_counts_for_more_new_tokens_than_are_expected() -> None:
    assert counted_tokens(10, 512, 16) == counted_tokens(10, 100_000, 16) == 528


@pytest.mark.parametrize(
    ("prompt", "counted"),
    [
        (1, 4 * 16),
        (15, 4 * 16 + 4 * 16),  # 8 new ones begin another block
        (16, 4 * 32),  # a full block at the end of the prompt is not shared
        (17, 16 + 4 * 16),
        (40, 32 + 4 * 16),
    ],
)
def test_answers_count_the_full_blocks_of_their_prompt_once_and_the_rest_each(prompt: int, counted: int) -> None:
    assert counted_tokens(prompt, 8, 16, answers=4) == counted


def test_the_bound_is_the_memory_of_the_worker() -> None:
    assert bound_tokens(WORKER) == 64


@pytest.mark.parametrize(
    ("placed", "counted", "room"), [(0, 64, True), (0, 80, True), (48, 16, True), (48, 32, False), (64, 16, False)]
)
def test_a_request_goes_while_the_bound_holds_and_always_alone(placed: int, counted: int, room: bool) -> None:
    assert has_room(placed, counted, 64) == room


def test_the_smaller_of_context_and_memory_limits_a_sequence() -> None:
    assert longest_tokens(WORKER) == 64
    assert [ever_fits(WORKER, tokens) for tokens in (0, 1, 63, 64, 65)] == [True, True, True, True, False]
