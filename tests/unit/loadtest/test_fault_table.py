"""The fault table: which rows there are, and which outcomes are believable."""

from __future__ import annotations

from collections import Counter

import pytest

from loadtest.fault_table import LIMIT_S, ROWS, STOP_S, Kind, Phase, Row, Side, rows_like


def row(name: str) -> Row:
    (found,) = rows_like(name)
    return found


def test_every_side_meets_every_fault_at_every_phase() -> None:
    counts = Counter(each.kind for each in ROWS)
    assert counts.pop(Kind.REDIS) == len(Side)
    assert set(counts.values()) == {len(Side) * len(Phase)}
    assert set(counts) == set(Kind) - {Kind.REDIS}
    assert len({each.name for each in ROWS}) == len(ROWS) == 52


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("*", 52), ("sender/*", 26), ("*/SIGKILL/*", 10), ("*/SIGKILL/posted,receiver/SIGSTOP/*", 7), ("nothing", 0)],
)
def test_rows_are_chosen_by_globs(pattern: str, count: int) -> None:
    assert len(rows_like(pattern)) == count


def test_everybody_has_given_up_before_a_stopped_process_goes_on() -> None:
    for each in rows_like("*/SIGSTOP/*"):
        assert LIMIT_S < each.deadline_s(each.survivor) < STOP_S


def test_only_an_offer_that_nobody_comes_for_may_last_as_long_as_its_lease() -> None:
    seen_at_once = rows_like("*/SIGKILL/*,*/restarted/*,*/link-cut/*")
    longer = {each.name for each in seen_at_once if each.deadline_s(each.survivor) > LIMIT_S}
    assert longer == {"receiver/SIGKILL/offered", "receiver/restarted/offered", "receiver/link-cut/offered"}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("sender/SIGKILL/offered", False, True),
        ("sender/SIGKILL/mid-piece", False, True),
        ("sender/SIGKILL/last-piece", True, True),
        ("sender/SIGKILL/acknowledged", True, False),
        ("receiver/SIGSTOP/posted", False, True),
        ("sender/link-cut/offered", True, False),
        ("sender/link-cut/posted", False, True),
        ("sender/lost-acknowledgement/last-piece", False, True),
        ("receiver/lost-acknowledgement/posted", False, True),
        ("receiver/lost-acknowledgement/mid-piece", True, False),
        ("receiver/lost-acknowledgement/acknowledged", True, False),
    ],
)
def test_what_was_lost_cannot_have_arrived_and_what_was_acknowledged_has(name: str, good: bool, bad: bool) -> None:
    assert (row(name).pull_may_be(good=True), row(name).pull_may_be(good=False)) == (good, bad)
