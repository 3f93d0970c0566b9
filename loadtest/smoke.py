"""`python -m loadtest smoke`: a minute of traffic, and whether the mesh bears it."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack

import click

from loadtest.arrivals import plan
from loadtest.client import run_plan
from loadtest.report import summarize, summary_line, summary_table
from services.cli.launch import launched
from services.cli.tables import table_console
from services.errors import StartError

POSITIVE = click.FloatRange(0, min_open=True)


@click.command()
@click.option("--grpc", "address", default="", help="A running mesh, HOST:PORT; empty starts one for the run.")
@click.option("--prefill", default=1, show_default=True, type=click.IntRange(0), help="Of the mesh that is started.")
@click.option("--decode", default=1, show_default=True, type=click.IntRange(1), help="Of the mesh that is started.")
@click.option("--model", default="smollm2", show_default=True, help="Of the mesh that is started.")
@click.option("--dtype", default="bf16", show_default=True, type=click.Choice(["bf16", "fp32"]), help="Likewise.")
@click.option("--seconds", default=60.0, type=click.FloatRange(0), show_default=True, help="How long requests arrive.")
@click.option("--rate", default=0.5, type=POSITIVE, show_default=True, help="Requests a second, on average (Poisson).")
@click.option("--seed", default=0, show_default=True, help="The same seed sends the same requests at the same times.")
@click.option("--limit-s", default=60.0, type=POSITIVE, show_default=True, help="When a client gives up.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
def smoke(
    address: str,
    prefill: int,
    decode: int,
    model: str,
    dtype: str,
    seconds: float,
    rate: float,
    seed: int,
    limit_s: float,
    as_json: bool,
) -> None:
    """Open-loop traffic over gRPC; a table of first-token time, gaps and errors.

    Exit status 1 when a request failed.
    """
    planned = plan(rate, seconds, seed)
    title = f"smoke, {rate:g} requests/s"
    with ExitStack() as stack:
        if not address:
            title += f", {prefill} prefill + {decode} decode"
            arguments = [f"--prefill={prefill}", f"--decode={decode}", f"--model={model}", f"--dtype={dtype}"]
            try:
                address = stack.enter_context(launched([*arguments, "--log-level=warning"])).grpc
            except StartError as error:
                raise click.ClickException(str(error)) from None
        click.echo(f"{len(planned)} requests in {seconds:.0f} s to {address}", err=True)
        begin_s = time.monotonic()
        measured = asyncio.run(run_plan(address, planned, limit_s=limit_s, clock=time.monotonic))
        summary = summarize(measured, time.monotonic() - begin_s)
    if as_json:
        click.echo(json.dumps(summary.as_dict()))
    else:
        table_console().print(summary_table(title, summary))
        click.echo(summary_line(summary))
    if summary.errors:
        raise SystemExit(1)
