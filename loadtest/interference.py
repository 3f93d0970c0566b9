"""`python -m loadtest interference`: what long prompts do to the answers of everybody else.

Users stream without pause (64-token prompts, 120 tokens out), first alone, then while a 1,024-token prompt arrives
every 3 s, whether the ones before are answered or not. The same over HTTP against a disaggregated mesh, against
aggregated ones (prefill in chunks beside decoding, for each number of workers and chunk budget that is tried; the best
of the trials runs in full), and against a peer. Every run has the machine to itself; the client shares the cores that
the decode step does not have.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click
import httpx

from loadtest.figures import require_matplotlib
from loadtest.interference_report import Answer, Observed, Summary, summarize, table
from loadtest.peers import FIRST_ID, LAST_ID, LIMIT_S, Server, arrivals, server_at
from services.cli.cores import plan_cores
from services.cli.launch import launched
from services.cli.tables import table_console
from services.errors import StartError

SHORT_PROMPT: Final = 64
SHORT_NEW: Final = 120
LONG_PROMPT: Final = 1024
LONG_NEW: Final = 16
"""More than one, so that the KV has to move."""

WARM_UP_S: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is sent. Times in seconds."""

    users: int = 4
    every_s: float = 3.0
    quiet_s: float = 20.0
    loaded_s: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """One of ours."""

    prefill: int
    decode: int
    chunk_tokens: int

    @property
    def name(self) -> str:
        """For people."""
        if self.prefill:
            return f"disaggregated ({self.prefill} prefill, {self.decode} decode)"
        return f"aggregated ({self.decode} × chunks of {self.chunk_tokens})"


class Users:
    """The clients of one run."""

    def __init__(self, client: httpx.AsyncClient, server: Server, load: Load, seed: int) -> None:
        self._client, self._server, self._load = client, server, load
        self._random = random.Random(seed)
        self._begin_s = time.perf_counter()
        self._answers: list[Answer] = []

    async def run(self, name: str) -> Observed:
        """The whole run. httpx.HTTPError: the server failed a request."""
        loaded_s = WARM_UP_S + self._load.quiet_s
        end_s = loaded_s + self._load.loaded_s
        async with asyncio.TaskGroup() as group:
            for _ in range(self._load.users):
                group.create_task(self._stream_until(end_s))
            await asyncio.sleep(loaded_s - self._now_s())
            for number in range(int(self._load.loaded_s / self._load.every_s)):
                await asyncio.sleep(max(0.0, loaded_s + number * self._load.every_s - self._now_s()))
                group.create_task(self._ask(LONG_PROMPT, LONG_NEW, long=True))
        answers = tuple(a for a in self._answers if a.sent_s >= WARM_UP_S)
        return Observed(name=name, loaded_s=loaded_s, end_s=end_s, answers=answers)

    async def _stream_until(self, end_s: float) -> None:
        while self._now_s() < end_s:
            await self._ask(SHORT_PROMPT, SHORT_NEW, long=False)

    async def _ask(self, prompt_tokens: int, new: int, *, long: bool) -> None:
        prompt = self._random.choices(range(FIRST_ID, LAST_ID), k=prompt_tokens)
        sent_s = self._now_s()
        times = await arrivals(self._client, self._server, prompt, new)
        came = tuple(at_s - self._begin_s for at_s in times)
        self._answers.append(Answer(long=long, sent_s=sent_s, arrivals_s=came, tokens=new))

    def _now_s(self) -> float:
        return time.perf_counter() - self._begin_s


async def observe(url: str, name: str, load: Load, **extra: object) -> Observed:
    """Runs the load against a server."""
    server = await server_at(url, **extra)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=LIMIT_S, limits=limits) as client:
        return await Users(client, server, load, seed=0).run(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where everything runs, and with which model."""

    cores: Sequence[int]
    model: str
    dtype: str

    def observe_mesh(self, mesh: Mesh, load: Load) -> Observed:
        """Starts a mesh, runs the load against it, stops it."""
        flags = [f"--prefill={mesh.prefill}", f"--decode={mesh.decode}", f"--chunk-tokens={mesh.chunk_tokens}"]
        with launched([*flags, f"--model={self.model}", f"--dtype={self.dtype}", "--log-level=warning"]) as ours:
            return self.observe_url(ours.http, mesh.name, load, decode=mesh.decode)

    def observe_url(self, url: str, name: str, load: Load, *, decode: int = 1, **extra: object) -> Observed:
        """Runs the load from the cores that a mesh leaves to everything but decode steps."""
        click.echo(f"{name}: {WARM_UP_S + load.quiet_s + load.loaded_s:.0f} s", err=True)
        others = plan_cores(self.cores, decode=decode, prefill=0).others or tuple(self.cores)
        os.sched_setaffinity(0, others)
        try:
            observed = asyncio.run(observe(url, name, load, **extra))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            os.sched_setaffinity(0, self.cores)
        click.echo(f"  {_in_short(summarize(observed))}", err=True)
        return observed

    def best_aggregated(self, meshes: Sequence[Mesh], load: Load) -> Mesh:
        """The one with the lowest loaded p99 in a short run."""
        if len(meshes) == 1:
            return meshes[0]
        found = [(summarize(self.observe_mesh(mesh, load)), mesh) for mesh in meshes]
        return min(found, key=lambda pair: pair[0].loaded.p99_s or float("inf"))[1]


def _in_short(summary: Summary) -> str:
    values = {"quiet p50": summary.quiet.p50_s, "loaded p99": summary.loaded.p99_s}
    return ", ".join(f"{name} {value_s * 1e3:.1f} ms" for name, value_s in values.items() if value_s is not None)


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Of our meshes.")
@click.option("--dtype", default="bf16", show_default=True, type=click.Choice(["bf16", "fp32"]), help="Likewise.")
@click.option("--users", default=4, show_default=True, type=click.IntRange(1), help="Who stream without pause.")
@click.option("--every-s", default=3.0, show_default=True, type=click.FloatRange(0.1), help="Between long prompts.")
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(1), help="How long they arrive.")
@click.option("--quiet-seconds", default=20.0, show_default=True, type=click.FloatRange(1), help="Before they do.")
@click.option("--trial-seconds", default=15.0, show_default=True, type=click.FloatRange(1), help="Of each trial.")
@click.option("--chunk-tokens", default=256, show_default=True, type=click.IntRange(1), help="Disaggregated.")
@click.option("--budget", "budgets", multiple=True, type=click.IntRange(1), help="Chunks tried. Default: 64, 128, 256.")
@click.option("--aggregated/--no-aggregated", default=True, show_default=True, help="Compare with aggregated meshes.")
@click.option("--peer", default="", help="An OpenAI-compatible server, http://HOST:PORT.")
@click.option("--plot", type=click.Path(file_okay=False, path_type=Path), help="A folder for a figure (matplotlib).")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
def interference(
    model: str,
    dtype: str,
    users: int,
    every_s: float,
    seconds: float,
    quiet_seconds: float,
    trial_seconds: float,
    chunk_tokens: int,
    budgets: tuple[int, ...],
    aggregated: bool,
    peer: str,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Gaps between tokens of short answers while long prompts arrive: disaggregated, aggregated, a peer."""
    load = Load(users=users, every_s=every_s, quiet_s=quiet_seconds, loaded_s=seconds)
    if plot:
        require_matplotlib()
    machine = Machine(cores=sorted(os.sched_getaffinity(0)), model=model, dtype=dtype)
    workers = sorted({1, len(machine.cores)})
    candidates = [
        Mesh(prefill=0, decode=count, chunk_tokens=tokens) for count in workers for tokens in budgets or (64, 128, 256)
    ]
    try:
        runs = [machine.observe_mesh(Mesh(prefill=1, decode=1, chunk_tokens=chunk_tokens), load)]
        if aggregated:
            trial = replace(load, quiet_s=1.0, loaded_s=trial_seconds)
            runs.append(machine.observe_mesh(machine.best_aggregated(candidates, trial), load))
        if peer:
            runs.append(machine.observe_url(peer, f"peer at {peer}", load, cache_prompt=False))
    except (StartError, httpx.HTTPError) as error:
        raise click.ClickException(str(error) or type(error).__name__) from None
    summaries = [summarize(observed) for observed in runs]
    for summary in summaries:
        if (summary.long_first_token.p50_s or 0.0) > every_s:
            click.echo(f"{summary.name}: long prompts take longer than the {every_s:g} s between them", err=True)
    if plot:
        from loadtest.interference_figure import draw  # matplotlib is an extra

        draw(runs, plot)
    if as_json:
        click.echo(json.dumps({"rows": [summary.as_dict() for summary in summaries]}))
    else:
        table_console().print(table(summaries))
