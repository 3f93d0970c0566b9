"""`python -m loadtest schedule`: what each schedule is worth, simulated over many kinds of traffic."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

import click

from loadtest.figures import require_matplotlib
from loadtest.progress import shown
from loadtest.schedule_costs import LIVE, Cost, costs, costs_table, decisions
from loadtest.schedule_file import read, written
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
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with what --json said once: shows that instead of running anything.",
)
@click.option("--real", is_flag=True, help="On live meshes with the real model instead.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODE_NAMES), help="Of --real, only this one.")
@click.option("--policy", "policies", multiple=True, help="Of --real, only this one beside fcfs; may be repeated.")
@click.option("--requests", default=300, show_default=True, type=click.IntRange(20), help="Of each --real run.")
@click.option("--first-seed", default=0, show_default=True, type=click.IntRange(0), help="Of --real.")
@click.option("--minutes", default=120.0, show_default=True, type=click.FloatRange(1), help="Most time of --real.")
@click.option("--model", default="smollm2", show_default=True, help="Of --real.")
@click.option("--quick", is_flag=True, help="Fewer loads, requests and seeds, no large batches: a minute.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, type=click.IntRange(1), help="Processes.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of tables.")
@click.option("--plot", type=click.Path(file_okay=False, path_type=Path), help="A folder for two figures (matplotlib).")
def schedule(
    seeds: int,
    names: Sequence[str],
    traces: Path | None,
    source: Path | None,
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

    The whole run takes twenty-five minutes on two cores. --real sends the same traffic, shortened, to live meshes,
    an hour and a half long; Ctrl-C or SIGTERM stops them and shows what there is by then.
    """
    if plot:
        require_matplotlib()
    status = 0
    spent: list[Cost] = []
    try:
        if source:
            runs, spent = read(source)
        elif real:
            live = Live(
                seeds=seeds,
                first_seed=first_seed,
                count=requests,
                limit_s=minutes * 60,
                model=model,
                modes=modes,
                policies=policies,
            )
            runs, status = _live(live)
        else:
            workloads = _chosen(_every(traces), names)
            sizes = LIVE[:3] if quick else LIVE
            click.echo(f"measuring what a decision costs, with up to {sizes[-1]:,} requests", err=True)
            spent = [*costs(time.process_time, live=sizes), *decisions(time.process_time, live=sizes)]
            seeds = min(seeds, 2) if quick else seeds
            with _sigterm_interrupts():
                runs = list(_runs(list(cells(workloads, quick=quick)), traces, seeds, jobs))
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(written(runs, spent))
    else:
        _print(runs, spent)
    if plot:
        from loadtest.schedule_figure import draw  # matplotlib is an extra

        draw(rows_of(runs), plot)
    if status:
        raise SystemExit(status)


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


def _print(runs: Sequence[Run], spent: Sequence[Cost]) -> None:
    for table in (*tables(rows_of(runs)), *([costs_table(spent)] if spent else [])):
        table_console().print(table)
    if gain := skip_join_gain(runs):
        click.echo(gain)


def _live(live: Live) -> tuple[list[Run], int]:
    """The runs that there are at the end, and the exit status."""
    from loadtest.schedule_real import live_runs  # starts meshes

    runs: list[Run] = []
    try:
        with _sigterm_interrupts():
            runs.extend(live_runs(live, say=partial(click.echo, err=True)))  # what came before an error stays
        if not runs:
            raise ValueError("--minutes: too few for a single seed; --requests and --mode make it shorter")
    except (StartError, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        return runs, 1
    except _Terminated:
        click.echo("terminated", err=True)
        return runs, 128 + signal.SIGTERM
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return runs, 128 + signal.SIGINT
    return runs, 0


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
        futures = [pool.submit(_run, cell, traces, seed) for cell in ordered for seed in range(seeds)]
        try:
            for done in as_completed(futures):
                one_more()
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # else an interrupt would be heard when all are done


def _run(cell: Cell, traces: Path | None, seed: int) -> Run:
    """In a process of its own: workloads are made again there, for functions cannot be sent."""
    return run(cell, _every(traces)[cell.workload], seed)
