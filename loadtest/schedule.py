"""`python -m loadtest schedule`: what each schedule is worth, simulated over many kinds of traffic."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

import click

from loadtest.progress import shown
from loadtest.schedule_costs import LIVE, costs, costs_table, decisions
from loadtest.schedule_modes import MODES, Live, skip_join_gain
from loadtest.schedule_report import rows_of, tables
from loadtest.schedule_runs import Cell, Run, cells, run
from loadtest.workloads import Workload, synthetic, traced
from services.cli.tables import table_console
from services.errors import StartError

MODE_NAMES = tuple(mode.name for mode in MODES)


@click.command()
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Runs of every cell.")
@click.option("--workload", "names", multiple=True, help="Only this one; may be repeated.")
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder with azure_2023_conv.csv and azure_2023_code.csv: their traffic, too.",
)
@click.option("--real", is_flag=True, help="On live meshes with the real model instead.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODE_NAMES), help="Of --real, only this one.")
@click.option("--policy", "policies", multiple=True, help="Of --real, only this one beside fcfs; may be repeated.")
@click.option("--requests", default=300, show_default=True, type=click.IntRange(20), help="Of each --real run.")
@click.option("--first-seed", default=0, show_default=True, type=click.IntRange(0), help="Of --real.")
@click.option("--minutes", default=90.0, show_default=True, type=click.FloatRange(1), help="Most time of --real.")
@click.option("--model", default="smollm2", show_default=True, help="Of --real.")
@click.option("--quick", is_flag=True, help="Fewer loads, requests and seeds, no large batches: a minute.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, type=click.IntRange(1), help="Processes.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of tables.")
@click.option("--plot", type=click.Path(file_okay=False, path_type=Path), help="A folder for two figures (matplotlib).")
def schedule(
    seeds: int,
    names: Sequence[str],
    traces: Path | None,
    real: bool,
    modes: Sequence[str],
    policies: Sequence[str],
    requests: int,
    first_seed: int,
    minutes: float,
    model: str,
    quick: bool,
    jobs: int,
    as_json: bool,
    plot: Path | None,
) -> None:
    """First come, first served against feedback queues and what else there is, on OPT-13B on an A100.

    The whole run takes a quarter of an hour on two cores. --real sends the same traffic, shortened, to live meshes,
    about an hour long; Ctrl-C or SIGTERM stops them and shows what there is by then.
    """
    if real:
        live = Live(
            seeds=seeds,
            first_seed=first_seed,
            count=requests,
            limit_s=minutes * 60,
            model=model,
            modes=modes,
            policies=policies,
        )
        _live(live, as_json)
        return
    try:
        workloads = _chosen(_every(traces), names)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if plot and find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs matplotlib: pip install 'diptych[plots]'")
    seeds = min(seeds, 2) if quick else seeds
    sizes = LIVE[:3] if quick else LIVE
    spent = [*costs(time.process_time, live=sizes), *decisions(time.process_time, live=sizes)]
    runs = list(_runs(list(cells(workloads, quick=quick)), traces, seeds, jobs))
    rows = rows_of(runs)
    if as_json:
        plain = {"rows": [row.as_dict() for row in rows], "costs": [asdict(one) for one in spent]}
        click.echo(json.dumps(plain))
    else:
        for table in (*tables(rows), costs_table(spent)):
            table_console().print(table)
        if gain := skip_join_gain(runs):
            click.echo(gain)
    if plot:
        from loadtest.figures import draw  # matplotlib is an extra

        for path in draw(rows, plot):
            click.echo(f"drawn: {path}", err=True)


class _Terminated(KeyboardInterrupt):
    """SIGTERM came. Whatever cleans up after Ctrl-C, asyncio for one, does so after this."""


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _live(live: Live, as_json: bool) -> None:
    from loadtest.schedule_real import live_runs  # starts meshes

    runs: list[Run] = []
    status = 0
    try:
        with _sigterm_interrupts():
            runs.extend(live_runs(live, say=partial(click.echo, err=True)))  # what came before an error stays
        if not runs:
            raise ValueError("--minutes: too few for a single seed; --requests and --mode make it shorter")
    except (StartError, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        status = 1
    except _Terminated:
        click.echo("terminated", err=True)
        status = 128 + signal.SIGTERM
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        status = 128 + signal.SIGINT
    rows = rows_of(runs)
    if as_json:
        seeds = [{**asdict(one.cell), "seed": one.seed, **one.values} for one in runs]
        click.echo(json.dumps({"rows": [row.as_dict() for row in rows], "runs": seeds}))
    else:
        for table in tables(rows):
            table_console().print(table)
        if gain := skip_join_gain(runs):
            click.echo(gain)
    if status:
        raise SystemExit(status)


def _chosen(every: Mapping[str, Workload], names: Sequence[str]) -> Sequence[Workload]:
    unknown = [name for name in names if name not in every]
    if unknown:
        raise ValueError(f"--workload: {unknown[0]!r} is none of {', '.join(every)}")
    return [workload for name, workload in every.items() if not names or name in names]


@lru_cache(maxsize=1)
def _every(traces: Path | None) -> Mapping[str, Workload]:
    return {workload.name: workload for workload in (*synthetic(), *(traced(traces) if traces else ()))}


def _runs(todo: Sequence[Cell], traces: Path | None, seeds: int, jobs: int) -> Iterable[Run]:
    """All of them, in any order, the most expensive first; the progress is shown on stderr."""
    ordered = sorted(todo, key=lambda cell: (not cell.kv_limited, -cell.load * cell.count))
    with (
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
        shown("simulating", len(ordered) * seeds) as one_more,
    ):
        for done in as_completed([pool.submit(_run, cell, traces, seed) for cell in ordered for seed in range(seeds)]):
            one_more()
            yield done.result()


def _run(cell: Cell, traces: Path | None, seed: int) -> Run:
    """In a process of its own: workloads are made again there, for functions cannot be sent."""
    return run(cell, _every(traces)[cell.workload], seed)
