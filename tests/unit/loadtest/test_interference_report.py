from __future__ import annotations

import pytest

from loadtest.interference_report import Answer, Observed, gaps, summarize, table


def answer(*arrivals_s: float, sent_s: float = 0.0, long: bool = False, tokens: int | None = None) -> Answer:
    return Answer(long=long, sent_s=sent_s, arrivals_s=arrivals_s, tokens=tokens or len(arrivals_s))


def observed(*answers: Answer) -> Observed:
    return Observed(name="ours <1>", loaded_s=10.0, end_s=20.0, answers=answers)


def test_a_message_of_two_tokens_ends_two_gaps_half_as_long() -> None:
    assert [gap.gap_s for gap in gaps(answer(1.0, 1.5, tokens=4))] == [0.25]
    assert [gap.gap_s for gap in gaps(answer(1.0, 1.5))] == [0.5]
    assert list(gaps(answer(1.0))) == []


def test_gaps_belong_to_the_part_in_which_they_are_whole() -> None:
    run = observed(answer(9.0, 9.25, 10.5, 11.0, 21.0))
    assert [gap.gap_s for gap in run.gaps(loaded=False)] == [0.25]
    assert [gap.gap_s for gap in run.gaps(loaded=True)] == [0.5]


def test_long_answers_count_for_their_first_token_only() -> None:
    run = observed(answer(12.0, 13.0, sent_s=11.0, long=True), answer(14.0, 14.1, sent_s=13.5))
    summary = summarize(run)
    assert summary.loaded.max_s == pytest.approx(0.1)
    assert (summary.long_first_token.p50_s, summary.short_first_token.p50_s) == (1.0, 0.5)
    assert (summary.long_answers, summary.short_answers) == (1, 1)


def test_an_answer_sent_before_the_long_prompts_says_nothing_of_first_tokens_among_them() -> None:
    assert summarize(observed(answer(10.5, 11.0, sent_s=9.0))).short_first_token.p50_s is None


@pytest.mark.parametrize(
    ("quiet_s", "loaded_s", "holds"), [(0.028, 0.0419, True), (0.028, 0.0421, False), (0.020, 0.031, False)]
)
def test_the_bar_is_a_ratio_and_an_absolute_time(quiet_s: float, loaded_s: float, holds: bool) -> None:
    summary = summarize(observed(answer(1.0, 1.0 + quiet_s), answer(11.0, 11.0 + loaded_s)))
    assert summary.loaded_p99_over_quiet_p50 == pytest.approx(loaded_s / quiet_s)
    assert summary.holds is holds


def test_a_run_without_gaps_has_no_numbers_and_does_not_hold() -> None:
    summary = summarize(observed())
    assert summary.loaded_p99_over_quiet_p50 is None
    assert not summary.holds
    assert table([summary]).row_count == 1
