"""A decode worker put together from its parts."""

from __future__ import annotations

import asyncio
from functools import partial

from kvtransfer.blocks import BlockPool
from kvtransfer.receiver import Receiver
from services.decode.config import DecodeConfig
from services.decode.copier import Copier
from services.decode.core import DecodeCore
from services.decode.hand_off import Puller
from services.decode.memory import Memory
from services.decode.messages import Command, Event
from services.decode.service import DecodeService
from services.decode.servicer import DecodeServicer
from services.schedule.budget import Bandwidth, Reserve
from services.schedule.catalog import policy_named
from services.schedule.swap import SwapMode, Swapper
from services.worker.process import Part, Parts, serve

FIRST_BYTES_PER_S = 2e9
"""Of copies to host memory and back, before the first one is measured."""


def assemble(config: DecodeConfig, parts: Parts) -> Part[Command, Event]:
    """The decode worker's own parts."""
    mode = SwapMode(config.swap)
    swaps = mode is not SwapMode.RECOMPUTE
    host_blocks = (config.host_kv_mib << 20) // parts.layout.block_bytes if swaps else 0
    receiver, copier = Receiver(parts.transport, parts.arena), Copier(parts.arena, host_blocks)
    service = DecodeService(Puller(receiver, parts.channels, parts.layout, parts.identity.incarnation), copier)
    core = DecodeCore(
        memory=Memory(
            pool=parts.pool,
            host=BlockPool(host_blocks),
            prefix=parts.prefix,
            swapper=Swapper(
                mode=mode,
                block_bytes=parts.layout.block_bytes,
                block_tokens=parts.layout.block_tokens,
                bandwidth=Bandwidth(bytes_per_s=FIRST_BYTES_PER_S),
                reserve=Reserve(total_blocks=parts.pool.counts().total),
            ),
        ),
        policy=policy_named(config.schedule),
        chunk_tokens=config.chunk_tokens,
        max_batch=config.max_batch,
        latency=lambda: parts.latency.latency,
    )

    async def aclose() -> None:
        await receiver.aclose()
        copier.close()

    return Part(
        core=core,
        deliver=service.deliver,
        attach=service.attach,
        servicers=(DecodeServicer(service, parts.identity, parts.card),),
        outstanding=lambda: service.outstanding,
        aclose=aclose,
    )


async def serve_worker(config: DecodeConfig, stop: asyncio.Event) -> None:
    """Runs one decode worker until `stop`."""
    await serve(
        config,
        "decode",
        service_names=[DecodeServicer.NAME],
        nice=0,
        assemble=partial(assemble, config),
        stop=stop,
    )
