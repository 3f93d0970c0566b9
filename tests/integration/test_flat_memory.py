"""L8, in the soak: requests by the thousand and a million through a real gateway and a real scheduler, processes of
their own before workers whose engine is made up. What the two hold must stay flat.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import grpc.aio
import psutil
import pytest
from diptych.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    request_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from tiny_models import make_tiny

from loadtest.flatness import Growth, Sample, growth, take
from services.cluster.membership import BlockCounts, Registration, WorkerRecord
from services.cluster.record import Role
from services.cluster.store import Store
from services.rpc.server import RpcServer

CLIENTS = 32
WARM_UP = 400
"""Requests. Until then, connections and threads come up to what so many clients need."""
SAMPLES = 50
PROMPT, NEW = 12, 4
ANSWER = [7, 8, 9, 10]
READY_LIMIT_S = 60.0
FLAT_B = 20.0
"""Bytes a request. Anything that a request leaves behind is more: its id alone is 80."""


class FakedEngine(prefill_pb2_grpc.PrefillServiceServicer, decode_pb2_grpc.DecodeServiceServicer):
    """A prefill or decode worker that knows every answer."""

    def __init__(self) -> None:
        self.decoded = self.prefilled = 0

    async def Prefill(self, request: object, context: object) -> prefill_pb2.PrefillResponse:  # noqa: N802
        self.prefilled += 1
        return prefill_pb2.PrefillResponse(token_id=ANSWER[0], chunks=1)

    async def Decode(  # noqa: N802
        self, request: object, context: object
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        self.decoded += 1
        begin = decode_pb2.DecodeBegin(transfer=request_pb2.TransferReport(bytes=1000, pieces=1, transport="ucx"))
        yield decode_pb2.DecodeResponse(token_ids=ANSWER[:2], begin=begin)
        reason = request_pb2.FINISH_REASON_LENGTH
        yield decode_pb2.DecodeResponse(offset=2, token_ids=ANSWER[2:], finish_reason=reason)


@contextmanager
def service(module: str, *flags: str) -> Iterator[psutil.Process]:
    """A process of a mesh."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, "--log-level=warning", *flags]
    process = subprocess.Popen(command, env=environ)
    try:
        yield psutil.Process(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:  # all at once, so that no two are the same
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


async def faked_worker(store: Store, role: Role, engine: FakedEngine, stack: AsyncExitStack) -> None:
    """Serves, and is known to the scheduler; never full, never idle."""
    server = RpcServer("127.0.0.1", 0, [])
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(engine, server.server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(engine, server.server)
    record = WorkerRecord(
        name=f"{role}-0",
        address=f"127.0.0.1:{server.bind()}",
        incarnation=os.urandom(8).hex(),
        role=role,
        state="ready",
        model="tiny",
        fingerprint="f",
        context_tokens=64,
        block_tokens=16,
        blocks=BlockCounts(total=1000, free=1000),
        running=1,
    )
    await server.start()
    stack.push_async_callback(server.stop, 0.0)
    registration = Registration(store, lambda: record)
    await registration.start()
    stack.push_async_callback(registration.aclose)


class Clients:
    """Some that ask one after the other, until `count` were answered; they watch the processes meanwhile."""

    def __init__(self, stub: gateway_pb2_grpc.GatewayServiceAsyncStub, watched: Sequence[psutil.Process]) -> None:
        self._stub, self._watched = stub, watched
        self._sent = self._done = 0
        self.samples: list[list[Sample]] = [[] for _ in watched]

    async def run(self, count: int) -> list[Growth]:
        """What came on top in each process. AssertionError: an answer is wrong; AioRpcError: a request failed."""
        for more in (WARM_UP, count):
            self.samples = [[] for _ in self._watched]
            self._sent = self._done = 0
            async with asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(self._ask(more))
        return [growth(samples) for samples in self.samples]

    async def _ask(self, count: int) -> None:
        while self._sent < count:
            self._sent += 1
            first = 3 + self._sent % 250
            asked = gateway_pb2.GenerateRequest(max_tokens=NEW, ignore_eos=True, tenant=f"tenant-{self._sent % 5}")
            asked.token_ids.ids.extend([first] * PROMPT)
            got = [token async for message in self._stub.Generate(asked, timeout=30) for token in message.token_ids]
            assert got == ANSWER
            self._done += 1
            if self._done % (count // SAMPLES) == 0:
                for process, samples in zip(self._watched, self.samples, strict=True):
                    samples.append(take(process, self._done))


async def until_two_workers(scheduler: str) -> None:
    async with grpc.aio.insecure_channel(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        async with asyncio.timeout(READY_LIMIT_S):
            while True:
                request = scheduler_pb2.ListWorkersRequest()
                if len((await stub.ListWorkers(request, timeout=READY_LIMIT_S, wait_for_ready=True)).workers) == 2:
                    return


@pytest.mark.soak
@pytest.mark.parametrize(
    ("count", "limit_bytes"),
    [
        # So few say that nothing large is left behind: a task is kilobytes, an answer's text and phases as well.
        (2_000, 4_000.0),
        pytest.param(1_000_000, FLAT_B, marks=[pytest.mark.timeout(4 * 3600)]),
    ],
)
async def test_requests_leave_nothing_behind_in_gateway_and_scheduler(
    redis_url: str, tmp_path: Path, count: int, limit_bytes: float
) -> None:
    make_tiny("llama", tmp_path / "tiny")
    scheduler_port, gateway_port, http_port = free_ports(3)
    scheduler_address = f"127.0.0.1:{scheduler_port}"
    doors = (f"--port={gateway_port}", f"--http-port={http_port}", f"--scheduler={scheduler_address}")
    engine = FakedEngine()
    async with AsyncExitStack() as stack:
        store = Store(redis_url)
        stack.push_async_callback(store.aclose)
        for role in ("prefill", "decode"):
            await faked_worker(store, role, engine, stack)
        watched = [
            stack.enter_context(service("services.scheduler", f"--redis={redis_url}", f"--port={scheduler_port}")),
            stack.enter_context(service("services.gateway", f"--model={tmp_path / 'tiny'}", *doors)),
        ]
        await until_two_workers(scheduler_address)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{gateway_port}"))
        await asyncio.wait_for(channel.channel_ready(), READY_LIMIT_S)
        grown = await Clients(gateway_pb2_grpc.GatewayServiceStub(channel), watched).run(count)
    print(*grown, sep="\n")
    assert engine.decoded == engine.prefilled == WARM_UP + count
    for name, one in zip(("scheduler", "gateway"), grown, strict=True):
        assert one.problems(limit_bytes) == [], name
