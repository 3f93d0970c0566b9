from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.cli.supervisor import ChildSpec, RestartPolicy, Signals, Supervisor, spawn
from services.errors import StartError

SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({mark!r}, 'w'); time.sleep(60)"
POLITE = """
import signal, sys, time
def end(*_):
    open({log!r}, "a").write({name!r} + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open({mark!r}, "w")
time.sleep(60)
"""


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as entered:
        yield entered


def child(name: str, code: str, *, stage: int = 0, drain_s: float = 10.0) -> ChildSpec:
    return ChildSpec(name=name, argv=(sys.executable, "-S", "-c", code), stop_stage=stage, drain_s=drain_s)


def exists(*paths: Path) -> bool:
    return all(path.exists() for path in paths)


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_it_is_ready_when_the_probe_says_so(signals: Signals) -> None:
    supervisor = Supervisor([child("a", SLEEP)], signals)
    answers = iter([False, False, True])
    try:
        supervisor.start()
        assert supervisor.wait_ready(lambda: next(answers), limit_s=10, poll_s=0.001)
        assert next(answers, None) is None
    finally:
        supervisor.stop()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit(3)", "bad exited with status 3 before the mesh was ready"),
        ("import os; os.kill(os.getpid(), 9)", "bad killed by SIGKILL before the mesh was ready"),
    ],
)
def test_a_child_that_dies_before_ready_is_named(signals: Signals, code: str, words: str) -> None:
    supervisor = Supervisor([child("good", SLEEP), child("bad", code)], signals)
    try:
        supervisor.start()
        with pytest.raises(StartError, match=words):
            supervisor.wait_ready(lambda: False, limit_s=30)
        good = supervisor.pids()["good"]
    finally:
        supervisor.stop()
    assert not runs(good)


def test_waiting_for_readiness_has_an_end(signals: Signals) -> None:
    supervisor = Supervisor([child("a", SLEEP)], signals)
    try:
        supervisor.start()
        with pytest.raises(StartError, match="not ready within 0 s"):
            supervisor.wait_ready(lambda: False, limit_s=0.05, poll_s=0.01)
    finally:
        supervisor.stop()


def test_a_stop_asked_for_before_ready_is_no_error(signals: Signals) -> None:
    supervisor = Supervisor([child("a", SLEEP)], signals)
    try:
        supervisor.start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not supervisor.wait_ready(lambda: False, limit_s=30)
    finally:
        supervisor.stop()


def test_what_dies_is_started_again_with_the_same_command(signals: Signals, tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    code = f"import os, time; open({str(lives)!r}, 'a').write(str(os.getpid()) + '\\n'); time.sleep(60)"
    supervisor = Supervisor([child("a", code), child("b", SLEEP)], signals)
    seen: list[int] = []

    def kill_twice_then_stop() -> None:
        pids = [int(line) for line in lives.read_text().split()] if lives.exists() else []
        if pids and pids[-1] not in seen:
            seen.append(pids[-1])
            os.kill(pids[-1], signal.SIGKILL) if len(seen) < 3 else os.kill(os.getpid(), signal.SIGINT)

    try:
        supervisor.start()
        b = supervisor.pids()["b"]
        supervisor.watch(kill_twice_then_stop)
        assert len(seen) == 3
        assert supervisor.pids() == {"a": seen[-1], "b": b}
    finally:
        supervisor.stop()
    assert not any(runs(pid) for pid in [*seen, b])


def test_dying_again_and_again_is_given_up(signals: Signals) -> None:
    policy = RestartPolicy(limit=3, first_pause_s=0.001)
    supervisor = Supervisor([child("bad", "raise SystemExit(7)")], signals, policy=lambda: policy)
    supervisor.start()
    with pytest.raises(StartError, match="bad exited with status 7; it died too often"):
        supervisor.watch()
    supervisor.stop()


def test_the_pause_before_a_restart_doubles_and_old_deaths_are_forgotten() -> None:
    policy = RestartPolicy(limit=5, window_s=60, first_pause_s=0.1)
    assert [policy.died(now) for now in (0, 1, 2, 3)] == [0.1, 0.2, 0.4, 0.8]
    assert policy.died(60.5) == 0.8  # the death at 0 is out of the window
    assert policy.died(60.6) is None


def test_the_limit_counts_deaths_within_the_window() -> None:
    policy = RestartPolicy(limit=2, window_s=10)
    assert policy.died(0) is not None
    assert policy.died(10) is not None
    assert policy.died(19.9) is None


def test_stages_are_stopped_in_order_and_each_may_drain(signals: Signals, tmp_path: Path) -> None:
    log, specs, marks = tmp_path / "log", [], []
    for stage, name in ((1, "last"), (0, "first")):
        marks.append(tmp_path / name)
        specs.append(child(name, POLITE.format(log=str(log), name=name, mark=str(marks[-1])), stage=stage))
    supervisor = Supervisor(specs, signals)
    supervisor.start()
    assert supervisor.wait_ready(lambda: exists(*marks), limit_s=30)
    supervisor.stop()
    assert log.read_text().split() == ["first", "last"]
    assert supervisor.pids() == {}


def test_what_ignores_sigterm_is_killed_after_its_drain_time(signals: Signals, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    supervisor = Supervisor([child("deaf", STUBBORN.format(mark=str(mark)), drain_s=0.2)], signals)
    supervisor.start()
    assert supervisor.wait_ready(mark.exists, limit_s=30)
    pid = supervisor.pids()["deaf"]
    supervisor.stop()
    assert not runs(pid)


def test_a_second_signal_ends_the_patience(signals: Signals, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    supervisor = Supervisor([child("deaf", STUBBORN.format(mark=str(mark)), drain_s=100)], signals)
    supervisor.start()
    assert supervisor.wait_ready(mark.exists, limit_s=30)
    helper = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -TERM {os.getpid()}"])
    begin_s = time.monotonic()
    supervisor.stop()
    helper.wait()
    assert time.monotonic() - begin_s < 50


def test_ctrl_c_in_the_terminal_reaches_only_the_supervisor(signals: Signals) -> None:
    supervisor = Supervisor([child("a", SLEEP)], signals)
    supervisor.start()
    pid = supervisor.pids()["a"]
    assert os.getpgid(pid) == pid != os.getpgrp()
    supervisor.stop()


def test_children_die_with_a_supervisor_that_is_killed() -> None:
    """A killed supervisor runs no clean-up: the kernel has to tell the children."""
    code = (
        "import sys; from services.cli.supervisor import *\n"
        "with Signals() as signals:\n"
        f"    s = Supervisor([ChildSpec(name='a', argv=(sys.executable, '-S', '-c', {SLEEP!r}))], signals)\n"
        "    s.start(); print(s.pids()['a'], flush=True); s.watch()\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    grandchild = psutil.Process(int(supervisor.stdout.readline()))
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    psutil.wait_procs([grandchild], timeout=10)
    assert not runs(grandchild.pid)


def test_what_a_child_prints_goes_to_stderr_not_stdout() -> None:
    code = (
        "import sys; from services.cli.supervisor import *\n"
        "process = spawn((sys.executable, '-S', '-c', 'print(\"from the child\")'), {})\n"
        "print(process.wait(), flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["0"]
    assert "from the child" in done.stderr


def test_a_child_learns_its_supervisor_and_its_own_variables() -> None:
    reader, writer = os.pipe()
    code = "import os; print(os.environ['DIPTYCH_PARENT_PID'], os.environ['X'], flush=True)"
    process = spawn((sys.executable, "-S", "-c", code), {"X": "y"}, stdout=writer)
    os.close(writer)
    assert process.wait(30) == 0
    with os.fdopen(reader) as answer:
        assert answer.read().split() == [str(os.getpid()), "y"]


def test_handlers_are_put_back_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    with Signals() as signals:
        assert signal.getsignal(signal.SIGTERM) != before[1]
        os.kill(os.getpid(), signal.SIGINT)
        signals.wait(5)
        assert signals.stops == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == before
