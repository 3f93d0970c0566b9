"""Starts processes, watches them, restarts those that die, stops them in order.

Life of a child here
    start     own session (Ctrl-C reaches only the supervisor), dies with the supervisor, stdout goes to stderr
    death     before the mesh is ready: everything stops and the death is reported
              afterwards: started again with the same command after a pause; too often, and everything stops
    stop      SIGTERM, a time to drain, then SIGKILL to its whole process group

Synchronous and single-threaded on purpose: a child is told of the death of the *thread* that forked it, and forking a
process that runs gRPC aborts children.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType

from services.errors import StartError
from services.process import PARENT_KEY, die_with_parent

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """One process: what runs, and when and how patiently it is stopped.

    Children of a lower `stop_stage` are stopped, and awaited for `drain_s`, before those of a higher one.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    stop_stage: int = 0
    drain_s: float = 10.0


class RestartPolicy:
    """How long to wait before a child that died is started again. Pure: times are passed in, in seconds.

    The pause doubles with every death within `window_s`; with the `limit`-th one it gives up.
    """

    def __init__(self, *, limit: int = 5, window_s: float = 60.0, first_pause_s: float = 0.1) -> None:
        self._limit, self._window_s, self._first_pause_s = limit, window_s, first_pause_s
        self._deaths: deque[float] = deque(maxlen=limit)

    def died(self, now_s: float) -> float | None:
        """Notes a death; returns the pause before the next start, or None to give up."""
        self._deaths.append(now_s)
        recent = sum(1 for death_s in self._deaths if now_s - death_s < self._window_s)
        return None if recent >= self._limit else self._first_pause_s * 2.0 ** (recent - 1)


class Signals:
    """SIGINT, SIGTERM and the death of a child wake `wait`; the first two are counted in `stops`.

    A context manager for the main thread; the handlers before are put back at its end.
    """

    _STOP = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.stops = 0
        self._before: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Signals:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (*self._STOP, signal.SIGCHLD):
            self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, timeout_s: float) -> None:
        """Returns at the next signal or after `timeout_s`, whichever is first."""
        ready, _, _ = select.select([self._reader], [], [], max(0.0, timeout_s))
        if ready:
            os.read(self._reader, 4096)

    def _arrived(self, number: int, _: FrameType | None) -> None:
        if number in self._STOP:
            self.stops += 1


class Child:
    """One running life of a `ChildSpec`."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self._process = spawn(spec.argv, spec.env)

    @property
    def pid(self) -> int:
        """Its process id, and that of its process group."""
        return self._process.pid

    def exit_words(self) -> str | None:
        """How it ended ("killed by SIGKILL", "exited with status 1"), or None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to its whole group; does nothing once its end was seen (the id may be another's by then)."""
        if self._process.returncode is None:
            os.killpg(self.pid, number)

    def reap(self, timeout_s: float) -> bool:
        """Waits for its end; False when it still runs."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def spawn(argv: Sequence[str], env: Mapping[str, str], *, stdout: int = 2) -> subprocess.Popen[bytes]:
    """Starts a process in its own session that gets SIGTERM when this one dies.

    `stdout`: a file descriptor, or subprocess.DEVNULL.
    """
    parent = os.getpid()

    def follow() -> None:
        die_with_parent()
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)

    return subprocess.Popen(
        list(argv),
        env={**os.environ, **env, PARENT_KEY: str(parent)},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        start_new_session=True,
        preexec_fn=follow,  # safe: this process has one thread
    )


class Supervisor:
    """Keeps a table of processes running. `clock` gives monotonic seconds."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        signals: Signals,
        *,
        clock: Callable[[], float] = time.monotonic,
        policy: Callable[[], RestartPolicy] = RestartPolicy,
    ) -> None:
        self._specs, self._signals, self._clock = specs, signals, clock
        self._policies = {spec.name: policy() for spec in specs}
        self._children: dict[str, Child] = {}
        self._starts_at_s: dict[str, float] = {}

    def pids(self) -> dict[str, int]:
        """Process ids by name of those that were started and not seen dead."""
        return {name: child.pid for name, child in self._children.items()}

    def start(self) -> None:
        """Starts every process."""
        for spec in self._specs:
            self._children[spec.name] = Child(spec)

    def wait_ready(self, is_ready: Callable[[], bool], *, limit_s: float, poll_s: float = 0.1) -> bool:
        """Polls `is_ready`; False when a stop was asked for first. StartError: a child died, or time is over."""
        deadline_s = self._clock() + limit_s
        while self._signals.stops == 0:
            for name, child in self._children.items():
                if words := child.exit_words():
                    raise StartError(f"{name} {words} before the mesh was ready")
            if is_ready():
                return True
            if self._clock() > deadline_s:
                raise StartError(f"the mesh was not ready within {limit_s:.0f} s")
            self._signals.wait(poll_s)
        return False

    def watch(self, also: Callable[[], None] = lambda: None) -> None:
        """Restarts what dies until a stop is asked for. StartError: one of them died too often.

        `also` is called at every wake-up, at least once a second and at every death of a child.
        """
        while self._signals.stops == 0:
            self._bury_dead()
            self._start_due()
            also()
            pauses_s = [at_s - self._clock() for at_s in self._starts_at_s.values()]
            self._signals.wait(min([1.0, *pauses_s]))

    def stop(self) -> None:
        """Stops everything, stage after stage. One more SIGINT or SIGTERM ends the patience."""
        asked = self._signals.stops
        for stage in sorted({spec.stop_stage for spec in self._specs}):
            running = [child for child in self._children.values() if child.spec.stop_stage == stage]
            for child in running:
                child.signal(signal.SIGTERM)
            self._await_end(running, asked)
            for child in running:
                if child.exit_words() is None:
                    log.warning("%s did not stop in time and is killed", child.spec.name)
                    child.signal(signal.SIGKILL)
                    child.reap(5.0)
                del self._children[child.spec.name]

    def _await_end(self, running: Sequence[Child], asked: int) -> None:
        deadline_s = self._clock() + max((child.spec.drain_s for child in running), default=0.0)
        while any(child.exit_words() is None for child in running):
            if self._signals.stops > asked or self._clock() > deadline_s:
                return
            self._signals.wait(0.2)

    def _start_due(self) -> None:
        now_s = self._clock()
        for spec in self._specs:
            if self._starts_at_s.get(spec.name, float("inf")) <= now_s:
                del self._starts_at_s[spec.name]
                self._children[spec.name] = Child(spec)
                log.info("%s started again (pid %d)", spec.name, self._children[spec.name].pid)

    def _bury_dead(self) -> None:
        for name, child in list(self._children.items()):
            words = child.exit_words()
            if words is None:
                continue
            del self._children[name]
            now_s = self._clock()
            pause_s = self._policies[name].died(now_s)
            if pause_s is None:
                raise StartError(f"{name} {words}; it died too often, giving up")
            log.warning("%s %s; it is started again in %.1f s", name, words, pause_s)
            self._starts_at_s[name] = now_s + pause_s
