"""Stop strings against the whole text, which is what a user sees. Case G6."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.stop import StopMatcher


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """What is shown of the whole text, by the definition."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def passed(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces)
    return shown + matcher.flush(), matcher.matched


@given(data=st.data(), stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
def test_any_cutting_of_any_text_shows_the_same(data: st.DataObject, stops: list[str]) -> None:
    pieces = data.draw(st.lists(st.text("abcd", max_size=6), max_size=12))
    assert passed(pieces, stops) == cut("".join(pieces), stops)


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_nothing_that_was_shown_belongs_to_a_stop_string(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    whole, _ = cut(text, stops)
    for character in text:
        shown += matcher.push(character)
        assert whole.startswith(shown)


def test_a_stop_string_spread_over_three_pieces_is_found_and_not_shown() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(piece) for piece in ("one S", "TO", "P two")] == ["one ", "", ""]
    assert matcher.matched
    assert matcher.push(" three") == "" and matcher.flush() == ""


def test_a_prefix_that_comes_to_nothing_is_shown_once() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(piece) for piece in ("ST", "ONE", "")] == ["", "STONE", ""]
    assert matcher.flush() == ""


def test_a_prefix_at_the_end_is_shown_by_the_flush_once() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("x STO") == "x "
    assert matcher.flush() == "STO"
    assert matcher.flush() == ""


@pytest.mark.parametrize("stops", [["END", "STOP"], ["STOP", "END"]])
def test_the_leftmost_of_several_matches_wins(stops: list[str]) -> None:
    assert passed(["a STOP b END"], stops) == ("a ", True)


def test_a_match_waits_for_one_that_may_have_begun_before_it() -> None:
    stops = ["abcd", "bc"]
    matcher = StopMatcher(stops)
    assert matcher.push("abc") == "" and not matcher.matched
    assert matcher.push("x") == "a" and matcher.matched
    assert passed(["abc", "d"], stops) == ("", True)
    assert passed(["abc"], stops) == ("a", True)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopMatcher([]).push("text") == "text"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
