"""`python -m services.prefill`: starts one prefill worker."""

from __future__ import annotations

import asyncio

from diptych.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from kvtransfer.sender import Sender
from services.config import load
from services.prefill.config import PrefillConfig
from services.prefill.core import Command, Event, PrefillCore
from services.prefill.service import PrefillService
from services.prefill.servicer import KvTransferServicer, PrefillServicer
from services.rpc.server import RpcServer
from services.runtime import run
from services.worker.process import Part, Parts, serve

NICE = 10
"""On a shared CPU decode's steps come first; a prompt that takes a little longer disturbs nobody's stream."""


def assemble(parts: Parts) -> Part[Command, Event]:
    """The prefill worker's own parts."""
    sender = Sender(parts.transport, parts.arena, incarnation=parts.identity.incarnation)
    service = PrefillService(sender)
    core = PrefillCore(
        pool=parts.pool,
        block_tokens=parts.config.block_tokens,
        chunk_tokens=parts.config.chunk_tokens,
        max_batch=parts.config.max_batch,
    )

    def register(rpc: RpcServer) -> None:
        prefill = PrefillServicer(service, parts.identity, parts.card)
        rpc.add(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, prefill)
        transfer = KvTransferServicer(sender, parts.identity)
        rpc.add(kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server, transfer)

    return Part(
        core=core,
        deliver=service.deliver,
        attach=service.attach,
        register=register,
        outstanding=lambda: service.outstanding,
        aclose=sender.aclose,
    )


def main() -> None:
    """Reads the configuration and runs until a signal."""
    config = load(PrefillConfig, "prefill", "Computes prompts in chunks and hands their KV to decode workers.")
    names = [
        prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name,
        kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name,
    ]

    async def serve_until(stop: asyncio.Event) -> None:
        await serve(config, "prefill", service_names=names, nice=NICE, assemble=assemble, stop=stop)

    run("prefill", serve_until)


if __name__ == "__main__":
    main()
