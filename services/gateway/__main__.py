"""The gateway: the door of the mesh. Native gRPC and OpenAI HTTP in, tokens out."""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from functools import partial

from diptych.v1 import gateway_pb2, gateway_pb2_grpc

from services.config import load
from services.engine.card import ModelCard, read_card
from services.engine.catalog import resolve
from services.engine.errors import EngineError
from services.errors import StartError
from services.gateway.closing import Closing
from services.gateway.config import GatewayConfig, parse_expected
from services.gateway.door import Gateway
from services.gateway.http import application
from services.gateway.http_server import HttpServer
from services.gateway.mesh import Mesh, Served
from services.gateway.metrics import Metrics
from services.gateway.peers import SchedulerClient, WorkerClient
from services.gateway.servicer import GatewayServicer
from services.gateway.text import Tokenizer
from services.process import keep_to_cores, parse_cores
from services.rpc.channels import Channels
from services.rpc.server import RpcServer
from services.runtime import run
from services.telemetry import tracing
from services.telemetry.context import set_up_logging

log = logging.getLogger(__name__)

ABOUT = "The gateway: native gRPC and OpenAI HTTP for clients; places requests and streams their answers."
DRAIN_GRACE_S = 10.0
LAST_WORDS_S = 1.0  # for the end of an answer to reach its client


async def serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Serves until `stop`, then drains. Raises StartError when it cannot start."""
    expect_prefill, expect_decode = parse_expected(config.expect)
    provider = tracing.set_up("gateway", f"gateway-{config.port}", config.otlp)
    rpc = RpcServer(config.host, config.port, [gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].full_name])
    http = HttpServer(config.host, config.http_port)
    where = f"grpc={config.host}:{rpc.bind()} http={config.host}:{http.bind()}"
    channels = Channels()
    try:
        mesh = await asyncio.to_thread(_mesh, config, channels)
        keep_to_cores(parse_cores(config.other_cores, "other-cores"))
        gateway = Gateway(
            mesh,
            request_limit_s=config.request_limit_s,
            expect_prefill=expect_prefill,
            expect_decode=expect_decode,
            new_id=lambda: uuid.uuid4().hex,
        )
        rpc.add(gateway_pb2_grpc.add_GatewayServiceServicer_to_server, GatewayServicer(gateway))
        await _serve_doors(rpc, http, gateway, f"serving {mesh.model.name} on {where}", stop)
        await mesh.closing.aclose()
    finally:
        await channels.aclose()
        if provider is not None:
            await asyncio.to_thread(provider.shutdown)


async def _serve_doors(rpc: RpcServer, http: HttpServer, gateway: Gateway, say: str, stop: asyncio.Event) -> None:
    await rpc.start()
    await http.start(application(gateway))
    await rpc.ready()
    log.info("%s", say)
    await stop.wait()
    # Requests first: both servers stay until those are over, and refuse new ones with an error of their own.
    await gateway.drain(DRAIN_GRACE_S)
    async with asyncio.TaskGroup() as group:
        group.create_task(rpc.stop(LAST_WORDS_S))
        group.create_task(http.stop(LAST_WORDS_S))


def _mesh(config: GatewayConfig, channels: Channels) -> Mesh:
    card = _card(config.model)
    scheduler, workers = SchedulerClient(channels, config.scheduler), WorkerClient(channels)
    return Mesh(
        model=Served(
            name=card.name, vocab=card.vocab, context_tokens=card.context_tokens, eos_token_ids=card.eos_token_ids
        ),
        tokenizer=Tokenizer.load(card.path),
        scheduler=scheduler,
        workers=workers,
        metrics=Metrics(),
        closing=Closing(scheduler, workers),
        draw_seed=partial(secrets.randbits, 64),
    )


def _card(model: str) -> ModelCard:
    try:
        files = resolve(model, progress=lambda line: log.info("%s", line))
        return read_card(files.path, files.name)
    except EngineError as error:
        raise StartError(str(error)) from error


def main() -> None:
    """Runs the gateway."""
    config = load(GatewayConfig, "gateway", ABOUT)
    set_up_logging("gateway", config.log_level)
    run("gateway", partial(serve, config))


if __name__ == "__main__":
    main()
