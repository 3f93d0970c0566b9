"""`python -m services.decode`: starts one decode worker."""

from __future__ import annotations

import asyncio

from diptych.v1 import decode_pb2, decode_pb2_grpc

from kvtransfer.receiver import Receiver
from services.config import load
from services.decode.config import DecodeConfig
from services.decode.core import Command, DecodeCore, Event
from services.decode.hand_off import Puller
from services.decode.service import DecodeService
from services.decode.servicer import DecodeServicer
from services.rpc.server import RpcServer
from services.runtime import run
from services.worker.process import Part, Parts, serve


def assemble(parts: Parts) -> Part[Command, Event]:
    """The decode worker's own parts."""
    receiver = Receiver(parts.transport, parts.arena)
    service = DecodeService(Puller(receiver, parts.channels, parts.layout, parts.identity.incarnation))
    core = DecodeCore(
        pool=parts.pool,
        block_tokens=parts.config.block_tokens,
        chunk_tokens=parts.config.chunk_tokens,
        max_batch=parts.config.max_batch,
    )

    def register(rpc: RpcServer) -> None:
        servicer = DecodeServicer(service, parts.identity, parts.card)
        rpc.add(decode_pb2_grpc.add_DecodeServiceServicer_to_server, servicer)

    return Part(
        core=core,
        deliver=service.deliver,
        attach=service.attach,
        register=register,
        outstanding=lambda: service.outstanding,
        aclose=receiver.aclose,
    )


def main() -> None:
    """Reads the configuration and runs until a signal."""
    config = load(DecodeConfig, "decode", "Takes KV in, steps all running requests together, streams tokens.")
    names = [decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name]

    async def serve_until(stop: asyncio.Event) -> None:
        await serve(config, "decode", service_names=names, nice=0, assemble=assemble, stop=stop)

    run("decode", serve_until)


if __name__ == "__main__":
    main()
