"""A decode worker put together from its parts."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

from kvtransfer.blocks import BlockPool
from kvtransfer.compression import Compression, allow
from kvtransfer.receiver import Receiver
from kvtransfer.transport.faulty import FaultyControls
from services.cluster.membership import MembershipView
from services.decode.config import DecodeConfig
from services.decode.copier import Copier
from services.decode.core import DecodeCore
from services.decode.hand_off import Puller
from services.decode.memory import Memory
from services.decode.messages import Command, Event
from services.decode.peers import Meeting, Peers
from services.decode.service import DecodeService
from services.decode.servicer import DecodeServicer
from services.schedule.budget import Bandwidth, Reserve
from services.schedule.catalog import policy_named
from services.schedule.swap import SwapMode, Swapper
from services.worker.process import Part, Parts, serve

FIRST_BYTES_PER_S = 2e9
"""Of copies to host memory and back, before the first one is measured."""
PEERS_REFRESH_S = 5.0
"""Comings and goings are announced; the whole list is only read again for what was missed."""


def assemble(config: DecodeConfig, parts: Parts) -> Part[Command, Event]:
    """The decode worker's own parts."""
    mode = SwapMode(config.swap)
    compression = cast("Compression", config.wire_compression)
    swaps = mode is not SwapMode.RECOMPUTE
    host_blocks = (config.host_kv_mib << 20) // parts.layout.block_bytes if swaps else 0
    receiver, copier = Receiver(parts.transport, parts.arena), Copier(parts.arena, host_blocks)
    incarnation, cuda = parts.identity.incarnation, parts.config.device != "cpu"
    meeting = Meeting(receiver, parts.channels, incarnation=incarnation, cuda=cuda)
    view = MembershipView(parts.store, refresh_s=PEERS_REFRESH_S)
    peers = Peers(view, meeting, parts.layout.fingerprint())
    controls = FaultyControls(parts.fault)
    puller = Puller(
        receiver,
        parts.channels,
        parts.layout,
        incarnation,
        allowed_from=lambda sender: allow(compression, peers.bytes_per_s(sender)),
        control_over=controls.over,
    )
    service = DecodeService(puller, copier)
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
        weights=parts.weights,
    )

    async def aclose() -> None:
        await peers.aclose()
        await receiver.aclose()
        copier.close()

    return Part(
        core=core,
        deliver=service.deliver,
        attach=service.attach,
        servicers=(DecodeServicer(service, parts.identity, parts.card),),
        outstanding=lambda: service.outstanding,
        start=peers.start,
        links=peers.links,
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
