"""`python -m loadtest faults`: kills, stops, cuts and silence at every phase of a transfer, and what is left of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import click
from rich.table import Table

from loadtest.fault_redis import run_redis_rows
from loadtest.fault_run import Outcome, run_row
from loadtest.fault_table import Kind, Row, rows_like
from services.cli.tables import table_console
from services.errors import StartError


@click.command()
@click.option(
    "--rows", "pattern", default="*", show_default=True, help="Which: a glob over VICTIM/FAULT/PHASE, or some."
)
@click.option("--jobs", default=3, show_default=True, type=click.IntRange(1), help="Rows that run at a time.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
def faults(pattern: str, jobs: int, as_json: bool) -> None:
    """The fault table of KV transfers: real processes, real kills.

    Exit status 1 when a row fails.
    """
    rows = rows_like(pattern)
    if not rows:
        raise click.ClickException(f"no row is like {pattern!r}")
    by_itself = [row for row in rows if row.kind is not Kind.REDIS]
    outcomes = asyncio.run(_run(by_itself, jobs))
    try:
        outcomes += run_redis_rows([row for row in rows if row.kind is Kind.REDIS])
    except StartError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps({"rows": [_values(outcome) for outcome in outcomes]}))
    else:
        table_console().print(_table(outcomes))
    if failed := sum(bool(outcome.error) for outcome in outcomes):
        raise click.ClickException(f"{failed} of {len(outcomes)} rows failed")


async def _run(rows: Sequence[Row], jobs: int) -> list[Outcome]:
    """Runs them, `jobs` at a time; the stopped ones, which wait most, first. Outcomes are in the order of the rows."""
    slots = asyncio.Semaphore(jobs)

    async def run(row: Row) -> Outcome:
        async with slots:
            outcome = await run_row(row)
        click.echo(f"{row.name}: {outcome.error or 'ok'} ({outcome.duration_s:.1f} s)", err=True)
        return outcome

    outcomes = await asyncio.gather(*(run(row) for row in sorted(rows, key=lambda row: row.kind is not Kind.STOPPED)))
    return sorted(outcomes, key=lambda outcome: rows.index(outcome.row))


def _values(outcome: Outcome) -> dict[str, object]:
    return {
        "row": outcome.row.name,
        "ok": not outcome.error,
        "error": outcome.error,
        "pull": outcome.pull or None,
        "settled_s": {side: round(settled_s, 3) for side, settled_s in outcome.settled_s.items()},
        "duration_s": round(outcome.duration_s, 3),
    }


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="faults in KV transfers", title_justify="left")
    for column in ("victim", "fault", "phase", "the pull", "nothing held after, s", "row, s", "holds"):
        table.add_column(column, justify="right" if column.endswith(" s") else "left")
    for outcome in outcomes:
        row = outcome.row
        settled = ", ".join(f"{side} {settled_s:.2f}" for side, settled_s in outcome.settled_s.items())
        table.add_row(
            row.victim.value,
            row.kind.value,
            row.phase.value,
            outcome.pull or "–",
            settled,
            f"{outcome.duration_s:.1f}",
            outcome.error or "yes",
        )
    return table
