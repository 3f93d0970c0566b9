"""The four services started one by one, `python -m services.NAME`, without the supervisor: with flags of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshes import Mesh

from services.cli.up import claim_ports

READY_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class HandMade:
    """A mesh, the folder of its logs (one file a service), and its processes."""

    mesh: Mesh
    logs: Path
    processes: dict[str, subprocess.Popen[bytes]]

    def end(self, name: str) -> None:
        """Lets one process drain and end; nobody brings it back."""
        _end(self.processes[name])


@contextmanager
def services_by_hand(
    model: str,
    redis_url: str,
    *,
    scheduler: Sequence[str] = (),
    worker: Sequence[str] = ("--dtype=fp32",),
    prefill_env: Mapping[str, str] | None = None,
    expect_prefill: int = 1,
) -> Iterator[HandMade]:
    """A mesh of one of each, ended with the block.

    `prefill_env`: variables for the prefill worker alone; `expect_prefill` 0: it need not come up.
    """
    ports = claim_ports({"grpc": 0, "http": 0, "scheduler": 0})
    scheduler_at = f"127.0.0.1:{ports['scheduler']}"
    gateway = [
        f"--port={ports['grpc']}",
        f"--http-port={ports['http']}",
        f"--scheduler={scheduler_at}",
        f"--model={model}",
    ]
    commands: list[tuple[str, Sequence[str], Mapping[str, str]]] = [
        ("scheduler", [f"--port={ports['scheduler']}", *scheduler], {}),
        ("prefill", [f"--model={model}", "--name=prefill-0", *worker], prefill_env or {}),
        ("decode", [f"--model={model}", "--name=decode-0", *worker], {}),
        ("gateway", [*gateway, f"--expect={expect_prefill}:1"], {}),
    ]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, flags, env in commands:
            log = stack.enter_context((folder / name).open("w"))
            process = subprocess.Popen(
                [sys.executable, "-m", f"services.{name}", f"--redis={redis_url}", *flags],
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                stderr=log,
                stdout=log,
            )
            stack.callback(_end, process)
            processes[name] = process
        http = f"http://127.0.0.1:{ports['http']}"
        _await_ready(http, folder)
        mesh = Mesh(
            grpc=f"127.0.0.1:{ports['grpc']}",
            http=http,
            scheduler=scheduler_at,
            pid=os.getpid(),
            model=model,
            stop=lambda: 0,
        )
        yield HandMade(mesh=mesh, logs=folder, processes=processes)


def _await_ready(http: str, logs: Path) -> None:
    deadline_s = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{http}/ready", timeout=2) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError("not ready: " + "\n".join(path.read_text() for path in logs.iterdir()))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
