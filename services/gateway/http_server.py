"""The HTTP server: uvicorn inside our event loop, on a socket that was bound before anything else depends on it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from services.errors import StartError


class _Quiet(uvicorn.Server):
    """Leaves signals to the process it is a part of."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an application on HOST:PORT; 0 takes a free port."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._socket: socket.socket | None = None
        self._server: _Quiet | None = None
        self._serving: asyncio.Task[None] | None = None

    def bind(self) -> int:
        """Takes the address and returns the port. Raises StartError when it cannot be had."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError as error:
            if self._socket is not None:
                self._socket.close()
            raise StartError(f"cannot listen on {self._host}:{self._port}: {error.strerror or error}") from None
        return int(self._socket.getsockname()[1])

    async def start(self, app: ASGIApp) -> None:
        """Serves `app`, after `bind`."""
        if self._socket is None:
            raise ValueError("bind comes first")
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False)
        self._server = _Quiet(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:  # uvicorn has no event for it
            if self._serving.done():
                raise StartError(f"the HTTP server on {self._host}:{self._port} ended at its start")
            await asyncio.sleep(0.01)

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, lets running responses end for `grace_s`, cancels the rest."""
        if self._serving is None or self._server is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, int(grace_s))
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=grace_s + 2.0)
        self._serving.cancel()
