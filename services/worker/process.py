"""A worker process from start to drain, the same for prefill and decode; `Part` is what differs.

Start: take the port, reach Redis, load the model, open the data plane, start the step thread, serve, register.
Stop: refuse new work and say so (draining), wait until nothing is outstanding, deregister, close from the outside in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar, cast

from kvtransfer.blocks import BlockPool
from kvtransfer.device import Arena
from kvtransfer.errors import TransferError
from kvtransfer.layout import DType, KvLayout
from kvtransfer.transport.base import Transport
from kvtransfer.transport.fault import Fault, parse_fault
from kvtransfer.transport.faulty import FaultyTransport
from kvtransfer.transport.ucx import UcxTransport
from services.cluster.membership import Registration
from services.cluster.record import MAX_LINKS, BlockCounts, Link, Role, State, WorkerRecord
from services.cluster.store import Store
from services.config import WorkerConfig
from services.engine.card import ModelCard, read_card
from services.engine.catalog import resolve
from services.engine.errors import EngineError
from services.engine.pool import layout_of
from services.engine.prefix import PrefixCache
from services.engine.runner import open_runner
from services.errors import StartError
from services.process import keep_to_cores, parse_cores
from services.rpc.channels import Channels
from services.rpc.server import RpcServer
from services.schedule.weights import Weights, parse_weights
from services.telemetry import tracing
from services.telemetry.context import set_up_logging
from services.worker.executor import Executor
from services.worker.identity import Identity
from services.worker.latency import LatencyModel
from services.worker.step_thread import StepThread
from services.worker.work import Load, StepCore

log = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")

DRAIN_LIMIT_S = 20.0

SWITCH_S = 0.001
"""How long the step thread waits for the interpreter while another thread uses it, instead of 5 ms. It asks at the
end of each computation, and what comes late then comes late for everybody.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a worker is made of, whatever its role."""

    config: WorkerConfig
    identity: Identity
    card: ModelCard
    layout: KvLayout
    arena: Arena
    pool: BlockPool
    prefix: PrefixCache
    transport: Transport
    channels: Channels
    latency: LatencyModel
    store: Store
    fault: Fault
    weights: Weights


class Servicer(Protocol):
    """A gRPC service of a worker."""

    def register(self, server: RpcServer) -> None:
        """Adds itself to a server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Generic[CommandT, EventT]):
    """What a role adds: its core, its shell's ends, its gRPC services."""

    core: StepCore[CommandT, EventT]
    deliver: Callable[[list[EventT]], None]
    attach: Callable[[StepThread[CommandT, EventT]], None]
    servicers: Sequence[Servicer]
    outstanding: Callable[[], int]
    start: Callable[[], Awaitable[None]]
    """Called once the worker serves and is known."""
    links: Callable[[], Sequence[Link]]
    aclose: Callable[[], Awaitable[None]]


async def serve(
    config: WorkerConfig,
    role: Role,
    *,
    service_names: Sequence[str],
    nice: int,
    assemble: Callable[[Parts], Part[CommandT, EventT]],
    stop: asyncio.Event,
) -> None:
    """Runs one worker until `stop`. StartError says in one line why it cannot start."""
    step_cores = sorted(parse_cores(config.step_cores, "step-cores"))
    other_cores = parse_cores(config.other_cores, "other-cores")
    fault, weights = _parsed(config)
    rpc = RpcServer(config.host, config.port, service_names)
    port = rpc.bind()
    identity = Identity(config.name or f"{role}-{port}", f"{config.host}:{port}")
    set_up_logging(identity.name, config.log_level)
    provider = tracing.set_up(role, identity.name, config.otlp)
    async with contextlib.AsyncExitStack() as stack:
        if provider:
            stack.callback(provider.shutdown)
        store = Store(config.redis)
        stack.push_async_callback(store.aclose)
        await store.connect()
        parts, executor = await _equip(config, identity, store, fault, weights, stack)
        keep_to_cores(other_cores)
        part = assemble(parts)
        crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        thread = StepThread(
            part.core,
            executor,
            deliver=part.deliver,
            on_crash=crash.set_exception,
            measured=parts.latency.observe,
            cores=step_cores,
            nice=nice,
        )
        part.attach(thread)
        for servicer in part.servicers:
            servicer.register(rpc)
        sys.setswitchinterval(SWITCH_S)
        thread.start()
        stack.push_async_callback(thread.stop, 2.0)
        stack.push_async_callback(part.aclose)
        await rpc.start()
        stack.push_async_callback(rpc.stop, 0.0)

        def record() -> WorkerRecord:
            return _record(parts, role, thread.load, part.links())

        registration = Registration(store, record)
        await registration.start()
        stack.push_async_callback(registration.aclose)
        await rpc.ready()
        await part.start()
        log.info("%s serves %s (%s) on %s", identity.name, parts.card.name, config.dtype, identity.address)
        await _until(stop, crash)
        await _drain(identity, registration, part.outstanding)


def _parsed(config: WorkerConfig) -> tuple[Fault, Weights]:
    """The settings that are lists."""
    name = "fault"
    try:
        fault = parse_fault(config.fault)
        name = "tenant-weight"
        return fault, parse_weights(config.tenant_weight)
    except ValueError as error:
        raise StartError(f"{name}: {error}") from None


async def _equip(
    config: WorkerConfig,
    identity: Identity,
    store: Store,
    fault: Fault,
    weights: Weights,
    stack: contextlib.AsyncExitStack,
) -> tuple[Parts, Executor]:
    """Everything that takes long or may be refused: the model, its memory, the data plane."""
    dtype = cast("DType", config.dtype)
    try:
        files = await asyncio.to_thread(resolve, config.model, progress=log.info)
        card = read_card(files.path, files.name)
    except EngineError as error:
        raise StartError(str(error)) from None
    layout = layout_of(card, dtype, config.block_tokens)
    blocks = (config.kv_mib << 20) // layout.block_bytes
    if blocks < 1:
        raise StartError(f"kv-mib: {config.kv_mib} MiB hold no block of {layout.block_bytes} bytes")
    transport = _transport(config, identity, fault)
    log.info("loading %s from %s", card.name, card.path)
    try:
        arena = Arena(layout, blocks, config.device)
        runner, committed = await asyncio.gather(
            asyncio.to_thread(open_runner, card, dtype=dtype, device=config.device, array=arena.array),
            asyncio.to_thread(arena.populate),
        )
        await transport.start()
    except (EngineError, TransferError) as error:
        raise StartError(str(error)) from None
    log.info("%s is served by the %s path", card.name, runner.path)
    if not committed:
        log.info("the memory for KV is committed as it is used: the first writes to it take longer")
    stack.push_async_callback(transport.aclose)
    channels = Channels()
    stack.push_async_callback(channels.aclose)
    pool = BlockPool(blocks)
    prefix = PrefixCache(
        pool,
        block_tokens=layout.block_tokens,
        fingerprint=layout.fingerprint(),
        enabled=config.prefix_cache == "on",
    )
    parts = Parts(
        config=config,
        identity=identity,
        card=card,
        layout=layout,
        arena=arena,
        pool=pool,
        prefix=prefix,
        transport=transport,
        channels=channels,
        latency=LatencyModel(chunk_tokens=config.chunk_tokens),
        store=store,
        fault=fault,
        weights=weights,
    )
    return parts, Executor(runner)


def _transport(config: WorkerConfig, identity: Identity, fault: Fault) -> Transport:
    """The data plane, made to fail if that is asked for."""
    transport = UcxTransport(identity.incarnation, host=config.host, cuda=config.device != "cpu")
    if fault == Fault():
        return transport
    log.warning("what this worker sends goes wrong on purpose: fault=%s", config.fault)
    return FaultyTransport(transport, fault)


def _record(parts: Parts, role: Role, load_now: Load, links: Sequence[Link]) -> WorkerRecord:
    blocks = load_now.blocks
    state: State = "draining" if parts.identity.draining else "ready"
    return WorkerRecord(
        name=parts.identity.name,
        address=parts.identity.address,
        incarnation=parts.identity.incarnation,
        role=role,
        state=state,
        model=parts.card.name,
        fingerprint=parts.layout.fingerprint(),
        context_tokens=parts.card.context_tokens,
        block_tokens=parts.layout.block_tokens,
        blocks=BlockCounts(
            total=blocks.total,
            free=blocks.free,
            held=blocks.held,
            leased=blocks.leased,
            swapped=blocks.swapped,
            cached=blocks.cached,
            host=load_now.host_blocks,
        ),
        queued_tokens=load_now.queued_tokens,
        running=load_now.running,
        waiting=load_now.waiting,
        swapped=load_now.swapped,
        levels=load_now.levels,
        schedule=load_now.schedule,
        latency=parts.latency.latency,
        links=tuple(links[:MAX_LINKS]),
    )


async def _until(stop: asyncio.Event, crash: asyncio.Future[None]) -> None:
    """Waits for the end. A step thread that died takes the process with it: its successor starts clean."""
    stopping = asyncio.create_task(stop.wait())
    ending: list[asyncio.Future[Literal[True]] | asyncio.Future[None]] = [stopping, crash]
    await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if crash.done():
        crash.result()


async def _drain(identity: Identity, registration: Registration, outstanding: Callable[[], int]) -> None:
    identity.draining = True
    await registration.announce()
    try:
        async with asyncio.timeout(DRAIN_LIMIT_S):
            while outstanding():  # noqa: ASYNC110 - several sources, and once in a life
                await asyncio.sleep(0.05)
    except TimeoutError:
        log.warning("%d requests were still running after %.0f s of draining", outstanding(), DRAIN_LIMIT_S)
