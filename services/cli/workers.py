"""`diptych workers`: who is there, and what they are doing."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from diptych.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from rich.table import Table

from services.cli.calls import channel_to
from services.cli.tables import table_console
from services.rpc.convert import latency_of, to_seconds

LIMIT_S = 10.0
# What the latency is shown for: a prompt, and a step of its request alone.
SHOWN_TOKENS = 1_000

Link = dict[str, str | float]
Value = str | int | float | None | dict[str, float] | tuple[int, ...] | list[Link]


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
    if any(row["links"] for row in rows):
        table_console().print(_links_table(rows))
    click.echo(f"{listed.queued_requests} requests queued")


def worker_values(view: worker_pb2.WorkerView) -> dict[str, Value]:
    """Plain values of one worker; blocks and tokens are counts, the age is in seconds.

    `prefill_fit` and `step_fit` are fields of services.latency, None while the worker does not know yet. `links`: one
    for each prefill worker that a decode worker has met, GB/s and µs as measured then.
    """
    blocks, latency = view.blocks, latency_of(view)
    prefill, step = latency.prefill, latency.step
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
        "blocks_host": blocks.host,
        "queued_tokens": view.queued_tokens,
        "running": view.running,
        "waiting": view.waiting,
        "swapped": view.swapped_requests,
        "schedule": view.schedule,
        "levels": tuple(view.level_requests),
        "heartbeat_age_s": to_seconds(view.heartbeat_age),
        "prefill_fit": None if prefill is None else asdict(prefill),
        "prefill_1000_tokens_ms": None if prefill is None else prefill.prompt_s(SHOWN_TOKENS) * 1e3,
        "step_fit": None if step is None else asdict(step),
        "links": [_link_values(link) for link in view.links],
        "step_batch_1_ms": None if step is None else step.step_s(context_tokens=SHOWN_TOKENS, batch=1) * 1e3,
    }


def _table(rows: list[dict[str, Value]]) -> Table:
    shown = ("name", "role", "state", "address", "incarnation", "running", "waiting", "queued_tokens")
    table = Table()
    for name in shown:
        table.add_column(name.replace("_", " "))
    table.add_column("schedule")
    for name in ("blocks free", "cached", "held", "leased", "swapped", "heartbeat", "prefill 1,000", "step"):
        table.add_column(name, justify="right")
    for row in rows:
        free = f"{row['blocks_free']}/{row['blocks_total']}"
        counts = (str(row[f"blocks_{name}"]) for name in ("cached", "held", "leased", "swapped"))
        speed = (
            _predicted(row, "prefill_1000_tokens_ms", "prefill_fit"),
            _predicted(row, "step_batch_1_ms", "step_fit"),
        )
        heartbeat = f"{row['heartbeat_age_s']:.1f} s ago"
        table.add_row(*(str(row[name]) for name in shown), _schedule(row), free, *counts, heartbeat, *speed)
    return table


def _schedule(row: dict[str, Value]) -> str:
    """Its name, and how many requests are in which of its levels, down to the last one that has any."""
    levels = row["levels"]
    counts = list(levels) if isinstance(levels, tuple) else []
    while counts and not counts[-1]:
        counts.pop()
    return f"{row['schedule']} {'/'.join(map(str, counts))}".strip()


def _links_table(rows: list[dict[str, Value]]) -> Table:
    """How KV comes to each decode worker, as measured when it met the prefill worker."""
    table = Table()
    for name in ("KV from", "to", "transport", "lanes"):
        table.add_column(name)
    for name in ("GB/s", "round trip"):
        table.add_column(name, justify="right")
    table.add_column("remark")
    for row in rows:
        for link in row["links"] if isinstance(row["links"], list) else ():
            measured = ("–", "–") if link["error"] else (f"{link['gbs']:.2f}", f"{link['round_trip_us']:.0f} µs")
            words = (str(link[name]) for name in ("transport", "lanes"))
            table.add_row(str(link["peer"]), str(row["name"]), *words, *measured, str(link["error"] or link["warning"]))
    return table


def _link_values(link: worker_pb2.Link) -> Link:
    return {
        "peer": link.peer,
        "peer_incarnation": link.peer_incarnation,
        "transport": link.transport,
        "lanes": link.lanes,
        "gbs": link.bytes_per_s / 1e9,
        "round_trip_us": to_seconds(link.round_trip) * 1e6,
        "error": link.error,
        "warning": link.warning,
    }


def _predicted(row: dict[str, Value], time_ms: str, fit: str) -> str:
    """A predicted time and its error; a dash while the worker does not know yet."""
    known = row[fit]
    return f"{row[time_ms]:.1f} ms ± {known['error']:.0%}" if isinstance(known, dict) else "–"


def _word(enum_name: str) -> str:
    return enum_name.removeprefix("ROLE_").removeprefix("WORKER_STATE_").lower()
