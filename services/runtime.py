"""How a service process lives: it starts with one clear line or not at all, drains on a signal, and ends.

    def main() -> None:                                  # in services/<name>/__main__.py
        config = load(SchedulerConfig, "scheduler", "…")
        run("scheduler", partial(serve, config))

    async def serve(config: SchedulerConfig, stop: asyncio.Event) -> None:
        ...                                              # start; StartError says why not
        await stop.wait()                                # SIGTERM or SIGINT
        ...                                              # drain, within a deadline of its own

- SIGTERM or SIGINT sets `stop`. A process that has not ended DRAIN_LIMIT_S later, or SECOND_SIGNAL_LIMIT_S after a
  second signal, exits hard with status 1.
- DIPTYCH_PARENT_PID: the process gets SIGTERM when that parent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from typing import NoReturn

from services.errors import StartError
from services.process import follow_parent

DRAIN_LIMIT_S = 30.0
SECOND_SIGNAL_LIMIT_S = 2.0

log = logging.getLogger(__name__)

Main = Callable[[asyncio.Event], Coroutine[None, None, None]]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For imports of hundreds of thousands of objects that live as long as the process.

    The collector does not look for garbage among them, neither now nor ever: not in the middle of a step either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run(service: str, main: Main) -> NoReturn:
    """Runs `main(stop)` until it returns, then exits: 0, or 1 after an error.

    A StartError (also inside an exception group) is one line on stderr; any other exception is a traceback. The exit
    skips the interpreter's own teardown: `main` has closed what it owns, and taking torch and UCX apart takes seconds.
    """
    try:
        status = _run(service, main)
    except Exception:  # noqa: BLE001 - the outermost edge of the process
        traceback.print_exc()
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(service: str, main: Main) -> int:
    faulthandler.enable()
    try:
        follow_parent(os.environ)
        asyncio.run(_with_signals(main))
    except StartError as error:
        _say(service, error)
        return 1
    except BaseExceptionGroup as group:
        found = _start_error(group)
        if found is None:
            raise
        _say(service, found)
        return 1
    return 0


async def _with_signals(main: Main) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        log.info("%s: %s", number.name, "stopping" if not stop.is_set() else "stopping at once")
        # A thread, because a stuck event loop is one of the reasons not to end.
        _exit_hard_in(SECOND_SIGNAL_LIMIT_S if stop.is_set() else DRAIN_LIMIT_S)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await main(stop)


def _exit_hard_in(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _start_error(group: BaseExceptionGroup[BaseException]) -> StartError | None:
    for error in group.exceptions:
        if isinstance(error, StartError):
            return error
        if isinstance(error, BaseExceptionGroup) and (found := _start_error(error)) is not None:
            return found
    return None


def _say(service: str, error: StartError) -> None:
    print(f"{service}: {error}", file=sys.stderr, flush=True)
