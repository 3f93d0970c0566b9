"""`diptych workers`: who is there, and what they are doing."""

from __future__ import annotations

import json

import click
from diptych.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from rich.table import Table

from services.cli.calls import channel_to
from services.cli.tables import table_console
from services.rpc.convert import to_seconds

LIMIT_S = 10.0


@click.command()
@click.option("--scheduler", default="127.0.0.1:50052", show_default=True, help="The scheduler, HOST:PORT.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def workers(scheduler: str, as_json: bool) -> None:
    """Lists the live workers of a running mesh."""
    with channel_to(scheduler) as channel:
        request = scheduler_pb2.ListWorkersRequest()
        listed = scheduler_pb2_grpc.SchedulerServiceStub(channel).ListWorkers(request, timeout=LIMIT_S)
    rows = [worker_values(view) for view in listed.workers]
    if as_json:
        click.echo(json.dumps({"workers": rows, "queued_requests": listed.queued_requests}))
        return
    table_console().print(_table(rows))
    click.echo(f"{listed.queued_requests} requests queued")


def worker_values(view: worker_pb2.WorkerView) -> dict[str, str | int | float]:
    """Plain values of one worker; blocks and tokens are counts, the age is in seconds."""
    blocks = view.blocks
    return {
        "name": view.ref.name,
        "role": _word(worker_pb2.Role.Name(view.role)),
        "state": _word(worker_pb2.WorkerState.Name(view.state)),
        "address": view.ref.address,
        "incarnation": view.ref.incarnation,
        "model": view.model,
        "context_tokens": view.context_tokens,
        "block_tokens": view.block_tokens,
        "blocks_total": blocks.total,
        "blocks_free": blocks.free,
        "blocks_held": blocks.held,
        "blocks_leased": blocks.leased,
        "blocks_swapped": blocks.swapped,
        "blocks_cached": blocks.cached,
        "queued_tokens": view.queued_tokens,
        "running": view.running,
        "waiting": view.waiting,
        "heartbeat_age_s": to_seconds(view.heartbeat_age),
    }


def _table(rows: list[dict[str, str | int | float]]) -> Table:
    shown = ("name", "role", "state", "address", "incarnation", "running", "waiting", "queued_tokens")
    table = Table()
    for name in shown:
        table.add_column(name.replace("_", " "))
    for name in ("blocks free", "cached", "held", "leased", "heartbeat"):
        table.add_column(name, justify="right")
    for row in rows:
        free = f"{row['blocks_free']}/{row['blocks_total']}"
        counts = (str(row[f"blocks_{name}"]) for name in ("cached", "held", "leased"))
        table.add_row(*(str(row[name]) for name in shown), free, *counts, f"{row['heartbeat_age_s']:.1f} s ago")
    return table


def _word(enum_name: str) -> str:
    return enum_name.removeprefix("ROLE_").removeprefix("WORKER_STATE_").lower()
