"""The scheduler put together: Redis, view, line, placer and gRPC server, from start to drain."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from services.cluster.membership import MembershipView
from services.cluster.queue import Queue
from services.cluster.store import Store
from services.errors import StartError
from services.process import keep_to_cores, parse_cores
from services.rpc.server import RpcServer
from services.scheduler.config import SchedulerConfig
from services.scheduler.line import Line
from services.scheduler.placer import Placer
from services.scheduler.servicer import SERVICE_NAME, SchedulerServicer

FIRST_VIEW_S = 5.0
DRAIN_S = 2.0

log = logging.getLogger(__name__)


@asynccontextmanager
async def serving(config: SchedulerConfig) -> AsyncIterator[str]:
    """Serves for the time of the block and gives the address, HOST:PORT. StartError when it cannot start.

    At the end waiting Place calls fail with UNAVAILABLE, and everything is closed within a few seconds.
    """
    async with AsyncExitStack() as stack:
        store = Store(config.redis)
        stack.push_async_callback(store.aclose)
        view, queue = MembershipView(store), Queue(store)
        line = Line(queue, view, config.queue_limit)
        placer = Placer(
            view, queue, line, local_prefill=config.local_prefill == "auto", new_id=lambda: uuid.uuid4().hex
        )
        server = RpcServer(config.host, config.port, [SERVICE_NAME])
        servicer = SchedulerServicer(placer, view, config.hand_off_limit_s)
        servicer.register(server)
        port = server.bind()
        await store.connect()
        await server.start()
        stack.push_async_callback(server.stop, DRAIN_S)
        await view.start()
        stack.push_async_callback(view.aclose)
        await line.start()
        stack.push_async_callback(line.aclose)
        stack.callback(placer.drain)
        await _first_view(view, store)
        await server.ready()
        log.info("listening on %s:%d", config.host, port)
        yield f"{config.host}:{port}"


async def _first_view(view: MembershipView, store: Store) -> None:
    try:
        async with asyncio.timeout(FIRST_VIEW_S):
            await view.synced()
    except TimeoutError:
        raise StartError(f"redis: {store.url} does not list workers within {FIRST_VIEW_S:g} s") from None


async def serve(config: SchedulerConfig, stop: asyncio.Event) -> None:
    """Serves until `stop`."""
    async with serving(config):
        keep_to_cores(parse_cores(config.other_cores, "other-cores"))
        await stop.wait()
