"""How service processes start, drain and end; real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from services.cluster.embedded import EmbeddedRedis, find_server
from services.errors import StartError
from services.process import parse_cores

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 20.0

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python programs and leaves none behind."""
    processes: list[subprocess.Popen[str]] = []

    def start_program(program: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start_program
    for process in processes:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def await_death(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while lives(pid):
        assert time.monotonic() < deadline, f"process {pid} still lives"
        os.sched_yield()


SERVICE = """
import asyncio, os
from services import runtime

async def main(stop):
    print("up", os.getpid(), sorted(os.sched_getaffinity(0)), flush=True)
    {body}

{before}
runtime.run("gateway", main)
"""


def service(body: str, before: str = "") -> str:
    return SERVICE.format(body=body, before=before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_well(start: Start, number: signal.Signals) -> None:
    process = start(service("await stop.wait(); print('drained', flush=True)"))
    assert line_of(process).startswith("up")
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    assert (out, err, process.returncode) == ("drained\n", "", 0)


@pytest.mark.parametrize(
    "failure",
    [
        "raise StartError('port 1 is in use')",
        "raise ExceptionGroup('x', [ExceptionGroup('y', [StartError('port 1 is in use')])])",
    ],
)
def test_what_keeps_it_from_starting_is_one_line(start: Start, failure: str) -> None:
    process = start(service(failure, before="from services.errors import StartError"))
    _, err = process.communicate(timeout=WAIT_S)
    assert (err, process.returncode) == ("gateway: port 1 is in use\n", 1)


def test_a_defect_is_a_traceback_and_a_failure(start: Start) -> None:
    process = start(service("raise KeyError('defect')"))
    _, err = process.communicate(timeout=WAIT_S)
    assert "Traceback" in err
    assert process.returncode == 1


def test_a_second_signal_ends_a_process_whose_event_loop_is_stuck(start: Start) -> None:
    program = service(
        "await stop.wait(); print('stuck', flush=True); await asyncio.sleep(0.1); print('again', flush=True)\n"
        "    import time; time.sleep(3600)",
        before="runtime.SECOND_SIGNAL_LIMIT_S = 0.1",
    )
    process = start(program)
    line_of(process)
    process.send_signal(signal.SIGTERM)
    assert line_of(process) == "stuck"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 1


def test_a_drain_that_never_ends_is_cut_off(start: Start) -> None:
    process = start(service("await asyncio.Event().wait()", before="runtime.DRAIN_LIMIT_S = 0.1"))
    line_of(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 1


def test_a_child_ends_when_its_parent_is_killed(start: Start) -> None:
    program = f"""
    import os, subprocess, sys, time
    environ = {{**os.environ, "DIPTYCH_PARENT_PID": str(os.getpid())}}
    subprocess.Popen([sys.executable, "-c", {service("await stop.wait()")!r}], env=environ)
    time.sleep(3600)
    """
    parent = start(program)
    child = int(line_of(parent).split()[1])
    assert lives(child)
    parent.kill()
    await_death(child)


def test_a_child_whose_parent_is_gone_already_does_not_start(start: Start) -> None:
    process = start(service("await stop.wait()"), {"DIPTYCH_PARENT_PID": "1" if os.getpid() != 1 else "2"})
    out, _ = process.communicate(timeout=WAIT_S)
    assert (out, process.returncode) == ("", 1)


def test_a_bad_parent_names_itself(start: Start) -> None:
    process = start(service("await stop.wait()"), {"DIPTYCH_PARENT_PID": "me"})
    _, err = process.communicate(timeout=WAIT_S)
    assert err.startswith("gateway: DIPTYCH_PARENT_PID: ")
    assert err.count("\n") == 1
    assert process.returncode == 1


def test_every_thread_of_a_process_keeps_to_its_cores(start: Start) -> None:
    core = max(os.sched_getaffinity(0))
    body = f"""
    from services.process import keep_to_cores
    await asyncio.to_thread(int)  # a thread that was there before
    keep_to_cores(frozenset({{{core}}}))
    print({{*map(frozenset, map(os.sched_getaffinity, map(int, os.listdir("/proc/self/task"))))}}, flush=True)
    """
    out, _ = start(service(body)).communicate(timeout=WAIT_S)
    assert out.splitlines()[-1] == str({frozenset({core})})


def test_cores_that_are_not_there_are_an_error_in_one_line(start: Start) -> None:
    body = "from services.process import keep_to_cores; keep_to_cores(frozenset({99999}))"
    process = start(service(body))
    _, err = process.communicate(timeout=WAIT_S)
    assert err == "gateway: cores [99999] are not available here\n"
    assert process.returncode == 1


@pytest.mark.parametrize(("text", "cores"), [("", set()), (" ", set()), ("0", {0}), ("0,2, 3", {0, 2, 3})])
def test_cores_are_a_list_of_numbers(text: str, cores: set[int]) -> None:
    assert parse_cores(text, "X") == cores


@pytest.mark.parametrize("text", ["a", "0,", "-1", "0-3"])
def test_anything_else_is_no_list_of_cores(text: str) -> None:
    with pytest.raises(StartError, match="X: "):
        parse_cores(text, "X")


def test_the_embedded_redis_is_private_and_leaves_nothing_behind() -> None:
    server = EmbeddedRedis()
    url = server.start()
    pid, folder = server.pid, server.folder
    assert pid is not None
    assert folder is not None
    assert url == f"unix://{folder}/redis.sock"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not any(":" in line.split()[1] and line.split()[3] == "0A" and _owns(pid, line) for line in _tcp_lines())
    server.stop()
    server.stop()
    assert not lives(pid)
    assert not folder.exists()


def _tcp_lines() -> list[str]:
    return Path("/proc/net/tcp").read_text().splitlines()[1:]


def _owns(pid: int, line: str) -> bool:
    inode = f"socket:[{line.split()[9]}]"
    return any(str(link.readlink()) == inode for link in Path(f"/proc/{pid}/fd").iterdir())


def test_an_embedded_redis_that_was_killed_says_so_and_starts_again_at_the_same_url(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    url = server.start()
    assert server.poll() is None
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    # Its main thread is a zombie before its last thread is gone, and only then is it reaped: ask until it is.
    deadline_s = time.monotonic() + 5
    while server.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert server.poll() == -signal.SIGKILL
    server.stop()
    assert server.start() == url
    server.stop()


def test_the_embedded_redis_ends_with_the_process_that_started_it(start: Start) -> None:
    program = """
    import time
    from services.cluster.embedded import EmbeddedRedis
    server = EmbeddedRedis()
    print(server.start(), server.pid, flush=True)
    time.sleep(3600)
    """
    parent = start(program)
    url, pid = line_of(parent).split()
    assert lives(int(pid))
    parent.kill()
    await_death(int(pid))
    socket_path = Path(url.removeprefix("unix://"))
    assert not socket_path.exists()
    socket_path.parent.rmdir()


def test_without_any_server_binary_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(StartError, match="valkey-server"):
        find_server()
