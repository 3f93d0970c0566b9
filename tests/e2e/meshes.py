"""Whole meshes for tests, started as people start them: through `diptych up`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, Unpack

import psutil

from services.cli.launch import launch

READY_LIMIT_S = 110.0
DEFAULTS = {"prefill": 1, "decode": 1, "dtype": "fp32"}


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A running mesh. `grpc` and `scheduler` are HOST:PORT, `http` is a URL, `pid` is the supervisor's."""

    grpc: str
    http: str
    scheduler: str
    pid: int
    model: str
    stop: Callable[[], int]
    """Drains and ends it; returns the exit status of `diptych up`. May be called twice."""

    def children(self) -> dict[str, psutil.Process]:
        """Its processes now, by name: gateway, scheduler, prefill-0, …, decode-0, …, redis."""
        return {name_of(process): process for process in psutil.Process(self.pid).children() if _runs(process)}

    def kill(self, name: str) -> None:
        """Kills one process with SIGKILL and waits until it is gone."""
        process = self.children()[name]
        process.kill()
        psutil.wait_procs([process], timeout=10)

    def wait_for(self, condition: Callable[[], bool], *, limit_s: float = 60.0) -> None:
        """Polls; fails the test when it does not become true in time."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline_s, "condition not reached in time"
            time.sleep(0.05)


def name_of(process: psutil.Process) -> str:
    """The name a child of `diptych up` goes by."""
    command = process.cmdline()
    for word in command:
        if word.startswith("--name="):
            return word.removeprefix("--name=")
    service = next((word for word in command if word.startswith("services.")), "")
    return service.removeprefix("services.") or "redis"


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and bool(process.cmdline())
    except psutil.NoSuchProcess:
        return False


class MeshOptions(TypedDict, total=False):
    """What `start` takes beside the model."""

    prefill: int
    decode: int
    dtype: str
    extra: Sequence[str]
    """Further flags of `diptych up`."""
    environ: dict[str, str]
    """Variables for all its processes."""


class StartMesh(Protocol):
    """The fixture `start_mesh`; the default model is a tiny one."""

    def __call__(self, model: str = ..., **options: Unpack[MeshOptions]) -> Mesh:
        """Starts a mesh and waits until it is ready."""


def start(model: str, **options: Unpack[MeshOptions]) -> Mesh:
    """Starts a mesh and waits until it is ready. Default: one prefill and one decode worker, fp32."""
    flags = [f"--{name}={options.get(name, default)}" for name, default in DEFAULTS.items()]
    flags += [f"--model={model}", *options.get("extra", ())]
    running = launch(flags, limit_s=READY_LIMIT_S, environ=options.get("environ"))
    return Mesh(
        grpc=running.grpc,
        http=running.http,
        scheduler=running.scheduler,
        pid=running.process.pid,
        model=model,
        stop=running.stop,
    )
