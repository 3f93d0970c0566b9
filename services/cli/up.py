"""`diptych up`: a whole mesh on this machine, in the foreground. Imports no gRPC (see `supervisor`)."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import click

from services.cli.local_redis import LocalRedis
from services.cli.supervisor import Signals, Supervisor, spawn
from services.cli.topology import CHILD_ENV, HOST, MeshOptions, mesh_children
from services.errors import StartError
from services.process import follow_parent

log = logging.getLogger(__name__)

READY_LIMIT_S = 600.0  # a large model takes minutes to load
PREPARE_LIMIT_S = 1800.0  # or to download
PORT = click.IntRange(0, 65535)

# The mesh is on this machine: a proxy of the environment must not be asked for it.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@click.command(context_settings={"show_default": True})
@click.option(
    "--model",
    default="smollm2",
    envvar="DIPTYCH_MODEL",
    show_envvar=True,
    help="Folder or Hugging Face id of the model.",
)
@click.option("--prefill", default=1, type=click.IntRange(0), help="Prefill workers; 0 is the aggregated mode.")
@click.option("--decode", default=1, type=click.IntRange(1), help="Decode workers.")
@click.option("--grpc-port", default=50051, type=PORT, help="Native gRPC; 0 takes a free one.")
@click.option("--http-port", default=8000, type=PORT, help="OpenAI HTTP; 0 takes a free one.")
@click.option("--scheduler-port", default=50052, type=PORT, help="Scheduler; 0 takes a free one.")
@click.option(
    "--redis",
    default="",
    envvar="DIPTYCH_REDIS",
    show_envvar=True,
    help="Redis or Valkey URL; empty starts an embedded one.",
)
@click.option(
    "--dtype",
    default="bf16",
    envvar="DIPTYCH_DTYPE",
    show_envvar=True,
    type=click.Choice(["bf16", "fp32"]),
    help="Precision of weights and KV.",
)
@click.option(
    "--chunk-tokens",
    default=256,
    envvar="DIPTYCH_CHUNK_TOKENS",
    show_envvar=True,
    type=click.IntRange(1),
    help="Most prompt tokens in a step.",
)
@click.option(
    "--kv-mib",
    default=512,
    envvar="DIPTYCH_KV_MIB",
    show_envvar=True,
    type=click.IntRange(1),
    help="KV memory a worker.",
)
@click.option(
    "--otlp",
    default="",
    envvar="DIPTYCH_OTLP",
    show_envvar=True,
    help="OTLP gRPC endpoint for traces; empty means off.",
)
@click.option(
    "--log-level",
    default="info",
    envvar="DIPTYCH_LOG_LEVEL",
    show_envvar=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
)
def up(**values: str | int) -> None:
    """Runs a mesh in the foreground: gateway, scheduler, workers and, unless --redis is given, Redis.

    Prints `ready grpc=HOST:PORT http=http://HOST:PORT` on stdout when requests are served. Logs go to stderr.
    SIGINT or SIGTERM drains and stops everything; a second one does not wait.
    """
    _set_up_logging(str(values["log_level"]))
    try:
        follow_parent(os.environ)
        with Signals() as signals:
            ports = claim_ports({name: int(values[name]) for name in ("grpc_port", "http_port", "scheduler_port")})
            options = MeshOptions(**{**values, **ports, "cores": tuple(sorted(os.sched_getaffinity(0)))})  # type: ignore[arg-type]  # click made the types
            run_mesh(options, signals)
    except StartError as error:
        raise click.ClickException(str(error)) from None


def run_mesh(options: MeshOptions, signals: Signals) -> None:
    """Starts the mesh, says that it is ready, keeps it running until a stop is asked for, stops it.

    StartError: it could not start, or one of its processes died too often.
    """
    begin_s = time.monotonic()
    if not _prepare_model(options.model, signals):
        return
    redis = LocalRedis()
    supervisor: Supervisor | None = None
    try:
        url = options.redis or redis.start()
        supervisor = Supervisor(mesh_children(replace(options, redis=url)), signals)
        supervisor.start()
        log.info("started %s", ", ".join(f"{name} (pid {pid})" for name, pid in supervisor.pids().items()))
        http = f"http://{HOST}:{options.http_port}"
        if supervisor.wait_ready(lambda: _answers(f"{http}/ready"), limit_s=READY_LIMIT_S):
            log.info("ready after %.1f s", time.monotonic() - begin_s)
            click.echo(f"ready grpc={HOST}:{options.grpc_port} http={http}")
            sys.stdout.flush()
            supervisor.watch(redis.revive)
    finally:
        log.info("stopping")
        if supervisor is not None:
            supervisor.stop()
        redis.stop()


def _prepare_model(model: str, signals: Signals) -> bool:
    """Makes the model ready before several workers want it at once. False when a stop was asked for."""
    # A process of its own: converting needs torch, and the supervisor stays small and single-threaded.
    process = spawn((sys.executable, "-m", "services.engine.catalog", model), CHILD_ENV, stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + PREPARE_LIMIT_S
    while process.poll() is None:
        if signals.stops or time.monotonic() > deadline_s:
            process.kill()
            process.wait()
            break
        signals.wait(1.0)
    if signals.stops:
        return False
    if process.returncode != 0:
        raise StartError(f"model {model!r} cannot be served")
    return True


def claim_ports(wanted: Mapping[str, int]) -> dict[str, int]:
    """The same ports, with a free one for each 0. StartError: one is in use, or wanted twice."""
    claimed: dict[str, int] = {}
    with ExitStack() as held:  # all at once, so that no two get the same
        for name, port in wanted.items():
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
                probe.listen(1)
            except OSError as error:
                flag = name.replace("_", "-")
                raise StartError(f"--{flag}: cannot listen on {HOST}:{port}: {error.strerror}") from None
            claimed[name] = int(probe.getsockname()[1])
    return claimed


def _answers(url: str) -> bool:
    try:
        with _OPENER.open(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _set_up_logging(level: str) -> None:
    line = "%(asctime)s %(levelname)-7s up %(message)s"
    logging.basicConfig(level=level.upper(), format=line, stream=sys.stderr, force=True)
