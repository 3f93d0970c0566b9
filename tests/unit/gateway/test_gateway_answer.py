"""The answer as it grows from the tokens of both legs, and whether it is tried again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.engine.sampling_spec import TokenLogprobs
from services.errors import DiptychError, HandOffLost, NotAdmitted, Unavailable
from services.gateway.answer import Answer, Piece
from services.gateway.placement import LegFailed, Placement, Worker, blame
from services.gateway.recovery import Recovery

END = 0


def decode(token_ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in token_ids if token != END)


class Clock:
    """Moves one second each time it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def begun(*stops: str, ends: frozenset[int] = frozenset({END})) -> Answer:
    answer = Answer(decode=decode, stops=stops, end_token_ids=ends, clock=Clock())
    answer.begin_leg()
    return answer


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_the_first_token_from_both_legs_is_taken_once() -> None:
    answer = begun()
    assert answer.accept(0, ids("H"), None) == Piece(text="H", token_ids=ids("H"))
    assert answer.accept(0, ids("H"), None) is None
    assert answer.accept(0, ids("Hi"), None) == Piece(text="i", token_ids=ids("i"))
    assert answer.token_ids == ids("Hi")


def test_the_end_token_counts_and_is_not_shown() -> None:
    answer = begun()
    piece = answer.accept(0, [*ids("Hi"), END], "stop")
    assert piece == Piece(text="Hi", token_ids=[*ids("Hi"), END], reason="stop")
    assert len(answer.token_ids) == 3


def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it() -> None:
    answer = begun("lo")
    piece = answer.accept(0, ids("Hello there"), None)
    assert piece == Piece(text="Hel", token_ids=ids("Hello"), reason="stop")
    assert answer.accept(11, ids("x"), "length") is None, "what comes later is ignored"
    assert answer.reason == "stop" and len(answer.token_ids) == 5


def test_text_held_back_for_a_stop_string_comes_with_the_end() -> None:
    answer = begun("XYZ")
    assert answer.accept(0, ids("aXY"), None) == Piece(text="a", token_ids=ids("aXY"))
    assert answer.accept(3, [], "length") == Piece(text="XY", token_ids=[], reason="length")


def logprobs_of(text: str) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(ord(character))) for character in text]


def shown(*pieces: Piece | None) -> list[tuple[str, int]]:
    """The tokens that pieces show, with their places in the text."""
    tokens = [token for piece in pieces if piece is not None for token in piece.shown]
    assert [token.logprobs for token in tokens] == logprobs_of("".join(chr(token.token_id) for token in tokens))
    return [(chr(token.token_id), token.text_offset) for token in tokens]


def test_logprobs_go_with_their_tokens_and_those_of_a_token_known_already_are_dropped() -> None:
    answer = begun()
    first = answer.accept(0, ids("H"), None, logprobs_of("H"))
    second = answer.accept(0, ids("Hi"), "length", [TokenLogprobs(0.0), *logprobs_of("i")])
    assert first is not None and first.logprobs == logprobs_of("H") and shown(first) == [("H", 0)]
    assert second is not None and list(second.logprobs) == logprobs_of("i") and shown(second) == [("i", 1)]


def test_without_logprobs_no_token_is_shown_one_by_one() -> None:
    piece = begun().accept(0, ids("Hi"), "length")
    assert piece is not None and not piece.shown and not piece.logprobs


def test_a_token_is_shown_with_its_text_and_never_when_a_stop_string_cuts_it_away() -> None:
    """l and o are tokens of the answer, and are told as such; they are not part of what is shown."""
    answer = begun("lo")
    first = answer.accept(0, ids("Hel"), None, logprobs_of("Hel"))
    assert first is not None and (first.text, shown(first)) == ("He", [("H", 0), ("e", 1)])
    last = answer.accept(3, ids("lo there"), None, logprobs_of("lo there"))
    assert last is not None and (last.text, shown(last)) == ("l", [("l", 2)])
    assert list(last.logprobs) == logprobs_of("lo") and list(last.token_ids) == ids("lo")


def test_a_token_that_a_stop_string_cuts_in_two_is_shown() -> None:
    answer = Answer(
        decode=lambda tokens: "Hello!" * len(tokens), stops=["llo"], end_token_ids=frozenset(), clock=Clock()
    )
    answer.begin_leg()
    piece = answer.accept(0, [72], None, logprobs_of("H"))
    assert piece is not None and (piece.text, shown(piece)) == ("He", [("H", 0)])


def test_at_the_end_every_token_but_the_end_token_has_been_shown() -> None:
    answer = begun("XYZ")
    first = answer.accept(0, ids("aX"), None, logprobs_of("aX"))
    last = answer.accept(2, [*ids("Y"), END], "stop", [*logprobs_of("Y"), TokenLogprobs(0.0)])
    assert shown(first) == [("a", 0)] and shown(last) == [("X", 1), ("Y", 2)]
    assert last is not None and len(last.logprobs) == 2


def test_tokens_of_half_characters_are_shown_when_the_character_is() -> None:
    halves = {1: b"\xc3", 2: b"\xa9"}
    answer = Answer(
        decode=lambda tokens: b"".join(halves[token] for token in tokens).decode(errors="replace"),
        stops=(),
        end_token_ids=frozenset(),
        clock=Clock(),
    )
    answer.begin_leg()
    some = [TokenLogprobs(-1.0)]
    first, second = answer.accept(0, [1], None, some), answer.accept(1, [2], None, some)
    assert first is not None and (first.text, first.shown) == ("", ())
    assert second is not None and second.text == "é" and [token.token_id for token in second.shown] == [1, 2]
    assert [token.text_offset for token in second.shown] == [0, 0]


def test_logprobs_that_do_not_match_their_tokens_are_an_error() -> None:
    with pytest.raises(DiptychError, match="2 tokens came with 1"):
        begun().accept(0, ids("Hi"), None, logprobs_of("H"))


def test_a_missing_token_is_an_error() -> None:
    answer = begun()
    answer.accept(0, ids("H"), None)
    with pytest.raises(DiptychError, match="tokens 1 to 2 of the answer are missing"):
        answer.accept(2, ids("x"), None)


@pytest.mark.parametrize("finished", [False, True])
def test_a_token_that_contradicts_one_taken_before_is_an_error(finished: bool) -> None:
    answer = begun()
    answer.accept(0, ids("Hi"), "length" if finished else None)
    with pytest.raises(DiptychError, match="disagree"):
        answer.accept(0, ids("J"), None)


def test_a_new_leg_counts_from_what_is_there() -> None:
    answer = begun()
    answer.accept(0, ids("He"), None)
    answer.begin_leg()
    assert answer.leg_tokens == 0
    assert answer.accept(0, ids("llo"), "length") == Piece(text="llo", token_ids=ids("llo"), reason="length")
    assert answer.token_ids == ids("Hello")


@pytest.mark.parametrize(("count", "mean"), [(0, None), (1, None), (2, 1.0), (5, 1.0)])
def test_the_time_per_token_is_the_mean_gap_after_the_first(count: int, mean: float | None) -> None:
    answer = begun()
    answer.accept(0, [65] * count, None)
    assert answer.time_per_token_s() == mean


PREFILL = Worker(name="prefill-0", address="a:1", incarnation="1" * 16)
DECODE = Worker(name="decode-0", address="a:2", incarnation="2" * 16)


def placement(prefill: Worker | None) -> Placement:
    return Placement(
        prefill=prefill,
        decode=DECODE,
        transfer_id="t",
        queue_s=0.0,
        local_prefill_reason="",
        hand_off_limit_s=1.0,
    )


@pytest.mark.parametrize(
    ("error", "leg", "prefill", "blamed"),
    [
        (HandOffLost("x"), DECODE, PREFILL, PREFILL),
        (HandOffLost("x"), DECODE, None, DECODE),
        (Unavailable("x"), DECODE, PREFILL, DECODE),
        (Unavailable("x"), PREFILL, PREFILL, PREFILL),
    ],
)
def test_a_lost_hand_off_is_its_senders_fault(
    error: DiptychError, leg: Worker, prefill: Worker | None, blamed: Worker
) -> None:
    assert blame(error, leg, placement(prefill)) == blamed


@pytest.mark.parametrize(("started", "retries"), [(False, 1), (True, 2)])
def test_retries_are_few_before_the_first_token_and_avoid_who_failed(started: bool, retries: int) -> None:
    recovery, failed = Recovery(), LegFailed(Unavailable("x"), DECODE)
    assert [recovery.again(failed, started=started) for _ in range(retries + 1)] == [True] * retries + [False]
    assert recovery.avoid == [DECODE] * (retries + 1)


def test_an_error_that_another_worker_would_repeat_is_not_tried_again() -> None:
    assert not Recovery().again(LegFailed(NotAdmitted("x"), DECODE), started=True)
