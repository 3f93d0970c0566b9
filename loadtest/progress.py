"""How far a long run is, on stderr: a bar on a terminal, lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_S: Final = 10.0


@contextmanager
def shown(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Gives what is to be called when one more of `total` is done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield in_lines(title, total, clock=time.monotonic, say=lambda line: click.echo(line, err=True))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def in_lines(title: str, total: int, *, clock: Callable[[], float], say: Callable[[str], None]) -> Callable[[], None]:
    """Says at once what there is to do; then, once in LINE_S at most, how much is done and, if all take alike, left."""
    begin_s, done = clock(), 0

    def line(elapsed_s: float) -> None:
        left = f", {elapsed_s / done * (total - done) / 60:.1f} min left" if done else ""
        say(f"{title}: {done} of {total}{left}")

    due = every(LINE_S, line)

    def one_more() -> None:
        nonlocal done
        done += 1
        due(clock() - begin_s)

    due(0.0)
    return one_more


def every(seconds: float, call: Callable[[float], None]) -> Callable[[float], None]:
    """Passes on an elapsed time, the first one and then one in so many seconds."""
    due_s = 0.0

    def passed(elapsed_s: float) -> None:
        nonlocal due_s
        if elapsed_s >= due_s:
            due_s = elapsed_s + seconds
            call(elapsed_s)

    return passed
