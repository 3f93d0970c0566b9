"""The Redis of a mesh on one machine: embedded unless a URL is given, revived at the same address when it dies."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from services.cli.supervisor import RestartPolicy
from services.cluster.embedded import FOLDER_PREFIX, EmbeddedRedis
from services.errors import StartError

log = logging.getLogger(__name__)

STALE_AFTER_S = 60.0  # younger folders may belong to a mesh that is just starting


class LocalRedis:
    """An embedded server whose folder, and so whose URL, outlives its process."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._policy = RestartPolicy()
        self._folder: Path | None = None
        self._server: EmbeddedRedis | None = None
        self._starts_at_s: float | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the server while it runs."""
        return None if self._server is None else self._server.pid

    def start(self) -> str:
        """Starts the server; returns its URL, unix://…. StartError: it could not be started."""
        remove_stale_folders(Path(tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        return self._launch(self._folder)

    def revive(self) -> None:
        """Starts the server again, empty, if it has died: workers register again by themselves.

        StartError: it died too often.
        """
        if self._folder is None:
            return
        if self._server is not None and (status := self._server.poll()) is not None:
            self._server.stop()
            self._server = None
            pause_s = self._policy.died(self._clock())
            if pause_s is None:
                raise StartError("redis died too often, giving up")
            log.warning("redis ended with status %d; it is started again in %.1f s", status, pause_s)
            self._starts_at_s = self._clock() + pause_s
        if self._starts_at_s is not None and self._clock() >= self._starts_at_s:
            self._starts_at_s = None
            (self._folder / "redis.sock").unlink(missing_ok=True)
            self._launch(self._folder)
            log.info("redis started again")

    def stop(self) -> None:
        """Ends the server and removes its folder."""
        server, self._server = self._server, None
        folder, self._folder = self._folder, None
        try:
            if server is not None:
                server.stop()
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _launch(self, folder: Path) -> str:
        self._server = EmbeddedRedis(folder)
        return self._server.start()


def remove_stale_folders(parent: Path) -> None:
    """Removes what supervisors that were killed have left: folders of ours in which no server answers."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        try:
            old = time.time() - folder.stat().st_mtime > STALE_AFTER_S
            if old and folder.stat().st_uid == os.getuid() and not _answers(folder / "redis.sock"):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # removed by somebody else meanwhile, or another user's
            continue


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
        except OSError:
            return False
        return True
