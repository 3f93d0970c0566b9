"""A gRPC server with health, reflection and our interceptor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.errors import StartError
from services.rpc.interceptor import CallInterceptor
from services.rpc.options import SERVER_OPTIONS

ServicerT = TypeVar("ServicerT")


class RpcServer:
    """Serves the given services on one address. `ready()` turns health to SERVING; until then it is NOT_SERVING."""

    def __init__(self, host: str, port: int, service_names: Sequence[str]) -> None:
        self._host, self._port = host, port
        self._names = [*service_names, ""]
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # added at import
        self.server = grpc.aio.server(interceptors=(CallInterceptor(),), options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        visible = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(visible, self.server)

    def add(self, register: Callable[[ServicerT, grpc.aio.Server], None], servicer: ServicerT) -> None:
        """Adds a servicer with its generated `add_…_to_server`."""
        register(servicer, self.server)

    def bind(self) -> int:
        """Takes the address and returns the port; calls wait until `start`. StartError: the address cannot be had."""
        try:
            return self.server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError:
            raise StartError(f"cannot listen on {self._host}:{self._port}: address in use or not ours") from None

    async def start(self) -> None:
        """Serves, after `bind` and the last `add`."""
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.server.start()

    async def ready(self) -> None:
        """Says that calls are served from now on."""
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, lets running ones end for `grace_s`, cancels the rest."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)
