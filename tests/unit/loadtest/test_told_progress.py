"""How far a run is, where nobody sees a bar."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from loadtest.progress import in_lines, shown


def test_a_line_every_ten_seconds_says_how_much_is_done_and_left() -> None:
    times, lines = iter((5.0, 10.0, 14.9, 15.1, 24.9, 65.0)), list[str]()
    one_more = in_lines("simulating", 40, clock=lambda: next(times), say=lines.append)
    assert lines == ["simulating: 0 of 40"]
    for _ in range(5):
        one_more()
    assert lines[1:] == ["simulating: 3 of 40, 2.1 min left", "simulating: 5 of 40, 7.0 min left"]


def test_nothing_to_do_is_said_too() -> None:
    lines = list[str]()
    in_lines("simulating", 0, clock=lambda: 0.0, say=lines.append)
    assert lines == ["simulating: 0 of 0"]


@pytest.mark.parametrize("steps", [1, 3])
def test_without_a_terminal_lines_go_to_stderr(steps: int) -> None:
    @click.command()
    def work() -> None:
        with shown("working", steps) as one_more:
            for _ in range(steps):
                one_more()

    result = CliRunner().invoke(work)
    assert (result.stdout, result.stderr) == ("", f"working: 0 of {steps}\n")
