"""A gRPC server with health, reflection and our interceptor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.errors import StartError
from services.rpc.interceptor import CallInterceptor
from services.rpc.options import SERVER_OPTIONS


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

    def add(self, register: Callable[[object, grpc.aio.Server], None], servicer: object) -> None:
        """Adds a servicer with its generated `add_…_to_server`."""
        register(servicer, self.server)

    async def start(self) -> int:
        """Binds and listens; returns the port. Raises StartError when the address cannot be had."""
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            self._port = self.server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError:
            raise StartError(f"cannot listen on {self._host}:{self._port}: address in use or not ours") from None
        await self.server.start()
        return self._port

    async def ready(self) -> None:
        """Says that calls are served from now on."""
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, lets running ones end for `grace_s`, cancels the rest."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)
