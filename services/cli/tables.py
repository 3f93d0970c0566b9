"""How wide tables for people are."""

from __future__ import annotations

from rich.console import Console

# Where nobody tells a width (a pipe, a log file), tables are not squeezed into rich's default of 80.
UNKNOWN_WIDTH = 210


def table_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr: as wide as the terminal, or wide enough for every table of ours."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=UNKNOWN_WIDTH)
