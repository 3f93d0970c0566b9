"""A mesh of one's own for as long as a block lasts: `diptych up` as a process. For the demo and load tests."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from services.cli.topology import HOST
from services.cli.up import claim_ports
from services.errors import StartError
from services.process import PARENT_KEY

READY_LIMIT_S = 1800.0  # a first start may have to convert or download the model
STOP_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedMesh:
    """A mesh that answers. Addresses are HOST:PORT, `http` is a URL."""

    grpc: str
    http: str
    scheduler: str
    process: subprocess.Popen[str]

    def stop(self) -> int:
        """Lets it drain and end, hard after STOP_LIMIT_S; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()


def launch(
    arguments: Sequence[str] = (),
    *,
    progress: Callable[[float], None] = lambda elapsed_s: None,
    limit_s: float = READY_LIMIT_S,
    environ: dict[str, str] | None = None,
) -> LaunchedMesh:
    """Starts `diptych up` with free ports and waits until it is ready.

    It ends by itself when this process dies. `progress` is called about once a second. Its log goes to this process's
    stderr. StartError: it ended or was not ready within `limit_s`.
    """
    ports = claim_ports({"grpc_port": 0, "http_port": 0, "scheduler_port": 0})
    flags = [f"--{name.replace('_', '-')}={port}" for name, port in ports.items()]
    # No preexec_fn: it would really fork, and this process may run gRPC.
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "up", *flags, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(environ or {}), PARENT_KEY: str(os.getpid())},
    )
    mesh = LaunchedMesh(
        grpc=f"{HOST}:{ports['grpc_port']}",
        http=f"http://{HOST}:{ports['http_port']}",
        scheduler=f"{HOST}:{ports['scheduler_port']}",
        process=process,
    )
    try:
        _await_ready(process, progress, limit_s)
    except BaseException:
        mesh.stop()
        raise
    return mesh


@contextmanager
def launched(
    arguments: Sequence[str] = (),
    *,
    progress: Callable[[float], None] = lambda elapsed_s: None,
    environ: dict[str, str] | None = None,
) -> Iterator[LaunchedMesh]:
    """`launch` for the length of a block. StartError also when the mesh did not stop cleanly."""
    mesh = launch(arguments, progress=progress, environ=environ)
    try:
        yield mesh
    finally:
        status = mesh.stop()
    if status != 0:
        raise StartError(f"the mesh ended with status {status}")


def _await_ready(process: subprocess.Popen[str], progress: Callable[[float], None], limit_s: float) -> None:
    assert process.stdout is not None
    begin_s = time.monotonic()
    while (elapsed_s := time.monotonic() - begin_s) < limit_s:
        progress(elapsed_s)
        if select.select([process.stdout], [], [], 1.0)[0]:
            line = process.stdout.readline()
            if line.startswith("ready "):
                return
            if not line:
                raise StartError(f"the mesh ended with status {process.wait(STOP_LIMIT_S)} before it was ready")
    raise StartError(f"the mesh was not ready within {limit_s:.0f} s")
