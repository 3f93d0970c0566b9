"""`diptych up` with real processes: ready means ready, what dies comes back, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from meshes import Mesh, StartMesh

CLI = (sys.executable, "-m", "services.cli")


def run(*arguments: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=limit_s)


def generate(mesh: Mesh, *arguments: str) -> dict[str, object]:
    done = run("generate", "What is the capital of France?", "--grpc", mesh.grpc, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(values, dict)
    return values


def left_of(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=20)[1]


def shared_memory_without_owner(before: set[Path]) -> set[Path]:
    """Files in /dev/shm that came since `before` and that no living process has mapped."""
    new = set(Path("/dev/shm").iterdir()) - before
    maps = ""
    for process in Path("/proc").glob("[0-9]*/maps") if new else ():
        try:
            maps += process.read_text()
        except OSError:
            continue
    return {path for path in new if str(path) not in maps}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for temporary files with a short name: a socket's path may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="mesh-") as name:
        yield Path(name)


def test_the_first_request_after_ready_is_served_through_both_workers(mesh: Mesh) -> None:
    values = generate(mesh, "--max-tokens=8", "--ignore-eos")
    phases = values["phases"]
    assert isinstance(phases, dict)
    assert len(values["token_ids"]) == 8  # type: ignore[arg-type]
    assert (phases["prefill_worker"], phases["decode_worker"]) == ("prefill-0", "decode-0")
    assert phases["transfer"]["transport"] == "ucx"
    assert phases["transfer"]["bytes"] > 0
    assert phases["placements"] == 1


def test_without_prefill_workers_decode_computes_the_prompt_and_gives_the_same_tokens(
    mesh: Mesh, aggregated_mesh: Mesh
) -> None:
    flags = ("--max-tokens=12", "--ignore-eos")
    alone, apart = generate(aggregated_mesh, *flags), generate(mesh, *flags)
    phases = alone["phases"]
    assert isinstance(phases, dict)
    assert phases["transfer"] is None
    assert phases["prefill_worker"] == phases["decode_worker"] == "decode-0"
    assert phases["local_prefill_reason"]
    assert alone["token_ids"] == apart["token_ids"]
    for usage in (alone["usage"], apart["usage"]):
        assert isinstance(usage, dict)
        usage.pop("cached_tokens")  # depends on what each was asked before
    assert alone["usage"] == apart["usage"]


def test_workers_lists_both_and_they_hold_nothing_when_idle(mesh: Mesh) -> None:
    def listed() -> list[dict[str, object]]:
        return list(json.loads(run("workers", "--scheduler", mesh.scheduler, "--json").stdout)["workers"])

    seen = {(w["name"], w["role"], w["state"]) for w in listed()}
    assert seen == {("prefill-0", "prefill", "ready"), ("decode-0", "decode", "ready")}
    generate(mesh, "--max-tokens=4")
    mesh.wait_for(lambda: all(w["blocks_free"] == w["blocks_total"] for w in listed()), limit_s=15)


def test_step_threads_have_the_cores_of_the_plan(mesh: Mesh) -> None:
    available = sorted(os.sched_getaffinity(0))
    gateway = mesh.children()["gateway"]
    assert os.sched_getaffinity(gateway.pid) == set(available[1:] or available)
    threads = {thread.id for thread in mesh.children()["decode-0"].threads()}
    pinned = [os.sched_getaffinity(thread) for thread in threads]
    if len(available) >= 2:
        assert {available[0]} in pinned
        assert pinned.count({available[0]}) == 1


def test_a_signal_drains_and_leaves_nothing(start_mesh: StartMesh, folder: Path) -> None:
    """SIGINT here; every other mesh of these tests is stopped with SIGTERM."""
    shared_before = set(Path("/dev/shm").iterdir())
    mesh = start_mesh(environ={"TMPDIR": str(folder)})
    family = [psutil.Process(mesh.pid), *mesh.children().values()]
    assert len(family) == 6
    assert len(list(folder.glob("diptych-redis-*/redis.sock"))) == 1
    os.kill(mesh.pid, signal.SIGINT)
    begin_s = time.monotonic()
    assert mesh.stop() == 0
    assert time.monotonic() - begin_s < 10, "an idle mesh has nothing to drain"
    assert left_of(family) == []
    assert list(folder.iterdir()) == []
    assert shared_memory_without_owner(shared_before) == set()


def test_children_of_a_supervisor_that_is_killed_die_by_themselves(start_mesh: StartMesh, folder: Path) -> None:
    mesh = start_mesh(environ={"TMPDIR": str(folder)})
    shared_before = set(Path("/dev/shm").iterdir())
    children = list(mesh.children().values())
    assert len(children) == 5
    os.kill(mesh.pid, signal.SIGKILL)
    assert left_of(children) == []
    assert list(folder.rglob("*.sock")) == []
    assert shared_memory_without_owner(shared_before) == set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--redis", "redis://127.0.0.1:1/0"], "127.0.0.1:1"),
    ],
)
def test_what_cannot_start_says_why_in_one_line_and_fails(tiny_llama: str, arguments: list[str], words: str) -> None:
    ports = ["--grpc-port=0", "--http-port=0", "--scheduler-port=0"]
    done = run("up", "--model", tiny_llama, *ports, "--log-level=error", *arguments, limit_s=100)
    assert done.returncode == 1
    assert done.stdout == ""
    assert any(words in line for line in done.stderr.splitlines()), done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 6, done.stderr


def test_a_port_in_use_fails_at_once(tiny_llama: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        done = run("up", "--model", tiny_llama, "--grpc-port=0", f"--http-port={port}", "--scheduler-port=0")
    assert done.returncode == 1
    assert done.stderr == f"Error: --http-port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
