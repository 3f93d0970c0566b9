"""Sends a plan over gRPC and notes when what came back; asks how fast workers are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio
from diptych.v1 import gateway_pb2, gateway_pb2_grpc, request_pb2, scheduler_pb2, scheduler_pb2_grpc

from loadtest.arrivals import Planned
from services.cli.calls import channel_to
from services.latency import Latency
from services.rpc.convert import latency_of
from services.rpc.options import CHANNEL_OPTIONS

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One request as its client saw it. Times are in seconds.

    `gaps_s`: time between tokens after the first; tokens of one message share the time since the message before.
    `late_s`: how much later than planned it was sent: large values mean that the load generator is the bottleneck.
    """

    late_s: float
    first_token_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    total_s: float = 0.0
    tokens: int = 0
    preemptions: int = 0
    swapped_bytes: int = 0
    error: str = ""


async def run_plan(
    address: str,
    planned: Sequence[Planned],
    *,
    limit_s: float,
    clock: Clock,
    answered: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Sends every request at its time, waits for all answers; each gives up after `limit_s`. Never raises for a
    request that fails: that is a measurement. `answered` is called whenever one is over.
    """
    begin_s = clock()
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel, asyncio.TaskGroup() as group:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        tasks = []
        for request in planned:
            await asyncio.sleep(max(0.0, begin_s + request.at_s - clock()))
            late_s = clock() - begin_s - request.at_s
            task = group.create_task(_measure(stub, request, late_s=late_s, limit_s=limit_s, clock=clock))
            task.add_done_callback(lambda _: answered())
            tasks.append(task)
        return [await task for task in tasks]


def latencies(scheduler: str, *, limit_s: float) -> list[Latency]:
    """What each worker of a mesh says of its own speed. CallFailed: the scheduler did not answer."""
    with channel_to(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return [
            latency_of(view) for view in stub.ListWorkers(scheduler_pb2.ListWorkersRequest(), timeout=limit_s).workers
        ]


async def _measure(
    stub: gateway_pb2_grpc.GatewayServiceAsyncStub, planned: Planned, *, late_s: float, limit_s: float, clock: Clock
) -> Measured:
    request = gateway_pb2.GenerateRequest(
        text=planned.prompt,
        max_tokens=planned.max_tokens,
        ignore_eos=True,
        sampling=request_pb2.SamplingParams(temperature=0.7, seed=planned.seed),
    )
    sent_s = last_s = clock()
    first_token_s: float | None = None
    gaps_s: list[float] = []
    tokens, error, turns = 0, "", request_pb2.Turns()
    try:
        async for message in stub.Generate(request, timeout=limit_s):
            if message.HasField("finish"):
                turns = message.finish.phases.turns
            count = len(message.token_ids)
            if count == 0:
                continue
            now_s = clock()
            later = count
            if first_token_s is None:
                first_token_s, later = now_s - sent_s, count - 1
            gaps_s.extend([(now_s - last_s) / later] * later if tokens else [0.0] * later)
            tokens, last_s = tokens + count, now_s
    except grpc.aio.AioRpcError as failure:
        error = failure.code().name
    if not error and tokens != planned.max_tokens:
        error = f"{tokens} tokens instead of {planned.max_tokens}"
    return Measured(
        late_s=late_s,
        first_token_s=first_token_s,
        gaps_s=tuple(gaps_s),
        total_s=clock() - sent_s,
        tokens=tokens,
        preemptions=turns.preemptions,
        swapped_bytes=turns.swapped_bytes,
        error=error,
    )
