"""A decode worker put together from its parts."""

from __future__ import annotations

import asyncio

from kvtransfer.receiver import Receiver
from kvtransfer.transport.faulty import FaultyControls
from services.decode.config import DecodeConfig
from services.decode.core import DecodeCore
from services.decode.hand_off import Puller
from services.decode.messages import Command, Event
from services.decode.service import DecodeService
from services.decode.servicer import DecodeServicer
from services.worker.process import Part, Parts, serve


def assemble(parts: Parts) -> Part[Command, Event]:
    """The decode worker's own parts."""
    receiver = Receiver(parts.transport, parts.arena)
    controls = FaultyControls(parts.fault)
    service = DecodeService(
        Puller(receiver, parts.channels, parts.layout, parts.identity.incarnation, control_over=controls.over)
    )
    core = DecodeCore(
        pool=parts.pool,
        prefix=parts.prefix,
        block_tokens=parts.config.block_tokens,
        chunk_tokens=parts.config.chunk_tokens,
        max_batch=parts.config.max_batch,
    )

    return Part(
        core=core,
        deliver=service.deliver,
        attach=service.attach,
        servicers=(DecodeServicer(service, parts.identity, parts.card),),
        outstanding=lambda: service.outstanding,
        aclose=receiver.aclose,
    )


async def serve_worker(config: DecodeConfig, stop: asyncio.Event) -> None:
    """Runs one decode worker until `stop`."""
    await serve(config, "decode", service_names=[DecodeServicer.NAME], nice=0, assemble=assemble, stop=stop)
