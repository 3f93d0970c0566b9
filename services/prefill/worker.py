"""A prefill worker put together from its parts."""

from __future__ import annotations

import asyncio
from typing import cast

from kvtransfer.compression import Compression
from kvtransfer.layout import KvLayout
from kvtransfer.sender import Sender
from services.latency import Latency
from services.prefill.config import PrefillConfig
from services.prefill.core import PrefillCore
from services.prefill.messages import Command, Event
from services.prefill.service import PrefillService
from services.prefill.servicer import KvTransferServicer, PrefillServicer
from services.schedule.catalog import policy_named
from services.worker.process import Part, Parts, serve

NICE = 10
"""On a shared CPU decode's steps come first; a prompt that takes a little longer disturbs nobody's stream."""


def produced_bytes_per_s(latency: Latency, layout: KvLayout) -> float:
    """KV that a prompt of one chunk makes, over the time it takes; longer ones make it more slowly. 0: not known."""
    if latency.prefill is None:
        return 0.0
    tokens = latency.prefill.chunk_tokens
    chunk_s = latency.prefill.prompt_s(tokens)
    return tokens * layout.token_bytes / chunk_s if chunk_s > 0 else 0.0


def assemble(parts: Parts) -> Part[Command, Event]:
    """The prefill worker's own parts."""
    # A checksum costs milliseconds a megabyte beside a transfer that prefill hides; without it a piece that was damaged
    # on its way would become a wrong answer instead of another placement.
    sender = Sender(
        parts.transport,
        parts.arena,
        incarnation=parts.identity.incarnation,
        checksums=True,
        compression=cast("Compression", parts.config.wire_compression),
        produced_bytes_per_s=lambda: produced_bytes_per_s(parts.latency.latency, parts.layout),
    )
    service = PrefillService(sender)
    core = PrefillCore(
        policy=policy_named(parts.config.schedule, sized=True),
        pool=parts.pool,
        prefix=parts.prefix,
        block_tokens=parts.config.block_tokens,
        chunk_tokens=parts.config.chunk_tokens,
        max_batch=parts.config.max_batch,
        latency=lambda: parts.latency.latency,
        weights=parts.weights,
    )

    prefill = PrefillServicer(service, parts.identity, parts.card)
    return Part(
        core=core,
        deliver=service.deliver,
        attach=service.attach,
        servicers=(prefill, KvTransferServicer(sender, parts.identity)),
        outstanding=lambda: service.outstanding,
        start=_nothing,
        links=lambda: (),
        aclose=sender.aclose,
    )


async def _nothing() -> None:
    """Receivers come to a prefill worker; it goes to nobody."""


async def serve_worker(config: PrefillConfig, stop: asyncio.Event) -> None:
    """Runs one prefill worker until `stop`."""
    await serve(
        config,
        "prefill",
        service_names=[PrefillServicer.NAME, KvTransferServicer.NAME],
        nice=NICE,
        assemble=assemble,
        stop=stop,
    )
