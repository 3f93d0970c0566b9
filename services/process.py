"""A process and its parent: children that end when the parent does, and the cores a process may use.

Imports nothing but the standard library: the supervisor uses it in the moment between fork and exec.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping

from services.errors import StartError

PARENT_KEY = "DIPTYCH_PARENT_PID"
_PR_SET_PDEATHSIG = 1

# Loaded here and not on first use: between fork and exec nothing may be imported.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Asks the kernel for SIGTERM when the thread that started this process ends. Does nothing outside Linux.

    Holds over exec, so it serves as `preexec_fn` of a child. The parent must start children from a thread that lives
    as long as itself.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def follow_parent(environ: Mapping[str, str]) -> None:
    """Ties this process to the parent named in DIPTYCH_PARENT_PID, if one is named.

    Raises StartError for a value that is no process id, and SystemExit when that parent has died already: its death
    signal was sent before anybody asked for it.
    """
    named = environ.get(PARENT_KEY, "")
    if not named:
        return
    if not named.isdigit():
        raise StartError(f"{PARENT_KEY}: {named!r} is not a process id")
    die_with_parent()
    if os.getppid() != int(named):
        raise SystemExit(1)


def parse_cores(text: str, name: str) -> frozenset[int]:
    """Core numbers of a list such as "0,2,3"; empty text gives the empty set. StartError names `name`."""
    try:
        cores = frozenset(int(part) for part in text.split(",")) if text.strip() else frozenset()
    except ValueError:
        raise StartError(f"{name}: {text!r} is not a list of cores such as 0,1") from None
    if any(core < 0 for core in cores):
        raise StartError(f"{name}: {text!r} has a negative core")
    return cores


def keep_to_cores(cores: frozenset[int]) -> None:
    """Keeps every thread of this process, and those they start, to these cores; none means all.

    A service calls it when it has loaded what it needs: until then it may use every core. StartError: there are no such
    cores here.
    """
    if not cores or sys.platform != "linux":
        return
    try:
        os.sched_setaffinity(0, cores)
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - numbers, not paths
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), cores)
    except OSError:
        raise StartError(f"cores {sorted(cores)} are not available here") from None
