"""The scheduler over real gRPC and a real Redis; workers are registrations without a process behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest
from diptych.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cluster.embedded import EmbeddedRedis
from services.cluster.membership import BlockCounts, Link, Registration, WorkerRecord
from services.cluster.store import Store
from services.latency import Latency, PrefillFit
from services.rpc.convert import latency_of, to_link
from services.rpc.errors import RETRY_AFTER_KEY
from services.scheduler import placer as placer_module
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import serving

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 15.0
TOKENS = 64  # a decode worker's memory

PlaceCall = Awaitable[scheduler_pb2.PlaceResponse]


@dataclass
class Client:
    """A scheduler as the gateway sees it."""

    stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub
    health: health_pb2_grpc.HealthStub

    def place(
        self,
        request_id: str,
        tokens: int = TOKENS,
        *,
        attempt: int = 1,
        model: str = "",
        avoid: tuple[WorkerRecord, ...] = (),
        timeout: float = WAIT_S,
    ) -> grpc.aio.UnaryUnaryCall[scheduler_pb2.PlaceRequest, scheduler_pb2.PlaceResponse]:
        refs = [worker_pb2.WorkerRef(name=w.name, address=w.address, incarnation=w.incarnation) for w in avoid]
        request = scheduler_pb2.PlaceRequest(
            request_id=request_id,
            attempt=attempt,
            model=model,
            prompt_tokens=tokens - 1,
            max_new_tokens=1,
            avoid=refs,
        )
        return self.stub.Place(request, timeout=timeout)  # type: ignore[return-value]

    async def finish(self, request_id: str) -> None:
        await self.stub.Finish(scheduler_pb2.FinishRequest(request_id=request_id), timeout=WAIT_S)

    async def listed(self) -> scheduler_pb2.ListWorkersResponse:
        return await self.stub.ListWorkers(scheduler_pb2.ListWorkersRequest(), timeout=WAIT_S)

    async def until_listed(self, holds: Callable[[scheduler_pb2.ListWorkersResponse], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds(await self.listed()):
                pass

    async def until_workers(self, count: int) -> None:
        await self.until_listed(lambda answer: len(answer.workers) == count)

    async def until_queued(self, count: int) -> None:
        await self.until_listed(lambda answer: answer.queued_requests == count)


@dataclass
class Mesh:
    """One Redis, its workers, and any number of schedulers."""

    redis_url: str
    store: Store
    stack: AsyncExitStack
    registrations: dict[str, Registration] = field(default_factory=dict)

    async def scheduler(self, **changes: object) -> Client:
        config = SchedulerConfig(**({"redis": self.redis_url, "port": 0} | changes))  # type: ignore[arg-type]
        address = await self.stack.enter_async_context(serving(config))
        return await self.stack.enter_async_context(client(address))

    async def worker(self, name: str, **changes: object) -> WorkerRecord:
        record = worker(name, **changes)
        registration = self.registrations[name] = Registration(self.store, lambda: record)
        await registration.start()
        self.stack.push_async_callback(registration.aclose)
        return record

    async def kill(self, name: str) -> None:
        """The worker is gone without a word."""
        task = self.registrations[name]._task
        assert task is not None
        task.cancel()


@asynccontextmanager
async def client(address: str) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Client(
            stub=scheduler_pb2_grpc.SchedulerServiceStub(channel),
            health=health_pb2_grpc.HealthStub(channel),  # type: ignore[no-untyped-call]
        )


def worker(name: str, **changes: object) -> WorkerRecord:
    fields: dict[str, object] = {
        "name": name,
        "address": f"{name}:1",
        "incarnation": os.urandom(8).hex(),
        "role": name.partition("-")[0],
        "state": "ready",
        "model": "tiny",
        "fingerprint": "f",
        "context_tokens": 1024,
        "block_tokens": 16,
        "blocks": BlockCounts(total=TOKENS // 16, free=TOKENS // 16),
        "running": 1,  # not idle: what is placed on it is believed
    }
    return WorkerRecord(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
async def mesh(redis_url: str) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        store = Store(redis_url)
        stack.push_async_callback(store.aclose)
        yield Mesh(redis_url=redis_url, store=store, stack=stack)


async def code_of(call: PlaceCall) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value.code()


async def test_a_request_is_placed_on_one_of_each_with_their_incarnations(mesh: Mesh) -> None:
    decode, prefill = await mesh.worker("decode-0"), await mesh.worker("prefill-0")
    scheduler = await mesh.scheduler(hand_off_limit_s=7.0)
    await scheduler.until_workers(2)
    answer = await scheduler.place("a")
    assert answer.decode == worker_pb2.WorkerRef(name="decode-0", address="decode-0:1", incarnation=decode.incarnation)
    assert answer.prefill.incarnation == prefill.incarnation
    assert not answer.local_prefill_reason
    assert len(answer.transfer_id) == 32
    assert answer.hand_off_limit.ToSeconds() == 7


async def test_the_hand_off_never_outlives_the_request(mesh: Mesh) -> None:
    await mesh.worker("decode-0")
    scheduler = await mesh.scheduler()
    answer = await scheduler.place("a", timeout=5.0)
    assert 0 < answer.hand_off_limit.ToMilliseconds() <= 5000


async def test_without_a_prefill_worker_it_is_local_unless_that_is_off(mesh: Mesh) -> None:
    await mesh.worker("decode-0")
    answer = await (await mesh.scheduler()).place("a", 16)
    assert not answer.HasField("prefill")
    assert answer.local_prefill_reason == "no prefill worker"
    assert await code_of((await mesh.scheduler(local_prefill="never")).place("b", 16)) == grpc.StatusCode.UNAVAILABLE


async def test_a_repeated_call_gets_the_same_placement_and_a_new_attempt_a_fresh_one(mesh: Mesh) -> None:
    first = await mesh.worker("decode-0")
    scheduler = await mesh.scheduler()
    answer = await scheduler.place("a")
    again = await scheduler.place("a")
    assert (again.transfer_id, again.decode) == (answer.transfer_id, answer.decode)
    await mesh.worker("decode-1")
    await scheduler.until_workers(2)
    fresh = await scheduler.place("a", attempt=2, avoid=(first,))
    assert fresh.transfer_id != answer.transfer_id
    assert fresh.decode.name == "decode-1"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND),
        ({"tokens": TOKENS + 1}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"attempt": 0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"tokens": 1}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_can_never_be_served_is_refused_at_once(
    mesh: Mesh, changes: dict[str, object], code: grpc.StatusCode
) -> None:
    await mesh.worker("decode-0")
    scheduler = await mesh.scheduler()
    await scheduler.until_workers(1)
    assert await code_of(scheduler.place("a", **changes)) == code  # type: ignore[arg-type]
    await scheduler.until_queued(0)


async def test_without_a_decode_worker_it_waits_a_little_for_one(mesh: Mesh) -> None:
    scheduler = await mesh.scheduler()
    call = asyncio.ensure_future(scheduler.place("a"))
    await mesh.worker("decode-0")
    assert (await call).decode.name == "decode-0"


async def test_when_none_comes_it_is_unavailable(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer_module, "NO_WORKER_S", 0.1)
    scheduler = await mesh.scheduler()
    assert await code_of(scheduler.place("a")) == grpc.StatusCode.UNAVAILABLE


async def test_the_only_worker_of_a_model_that_restarts_is_waited_for_beside_another_model(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placer_module, "NO_WORKER_S", WAIT_S)
    await mesh.worker("decode-0", model="other")
    await mesh.worker("decode-1")
    scheduler = await mesh.scheduler()
    await scheduler.until_workers(2)
    await scheduler.place("a", model="tiny")
    await mesh.registrations["decode-1"].aclose()
    await scheduler.until_workers(1)
    call = asyncio.ensure_future(scheduler.place("b", model="tiny"))
    await mesh.worker("decode-1")
    assert (await call).decode.name == "decode-1"


async def test_requests_go_in_the_order_in_which_they_came(mesh: Mesh) -> None:
    await mesh.worker("decode-0")
    scheduler = await mesh.scheduler()
    await scheduler.place("first")
    order: list[str] = []

    async def ask(name: str) -> None:
        answer = await scheduler.place(name)
        assert answer.queue.ToNanoseconds() > 0
        order.append(name)
        await scheduler.finish(name)

    names = ["d", "a", "c", "b"]
    async with asyncio.TaskGroup() as group:
        for position, name in enumerate(names):
            group.create_task(ask(name))
            await scheduler.until_queued(position + 1)
        assert order == []
        await scheduler.finish("first")
    assert order == names
    await scheduler.until_queued(0)


async def test_a_long_line_that_moves_is_not_written_anew_each_time(mesh: Mesh) -> None:
    client, waiting = await mesh.scheduler(), 40
    await mesh.worker("decode-0")
    await client.until_workers(1)

    async def placed_and_finished(request_id: str) -> None:
        await client.place(request_id)  # fills the worker
        await client.finish(request_id)

    await client.place("first")
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for index in range(waiting):
            group.create_task(placed_and_finished(f"r{index}"))
        await client.until_queued(waiting)
        begin = await looked_up(mesh.store)
        await client.finish("first")
    assert await looked_up(mesh.store) - begin < 8 * waiting  # 40 · 39 ÷ 2 if all were kept alive at every move


async def looked_up(store: Store) -> int:
    """How often somebody's place in line was."""
    stats = await store._client.info("commandstats")
    return int(stats["cmdstat_zscore"]["calls"])


async def test_several_small_requests_run_side_by_side_until_the_memory_is_full(mesh: Mesh) -> None:
    await mesh.worker("decode-0")
    scheduler = await mesh.scheduler()
    for name in ("a", "b", "c", "d"):
        await scheduler.place(name, 16)
    waiting = asyncio.ensure_future(scheduler.place("e", 2))
    await scheduler.until_queued(1)
    assert not waiting.done()
    await scheduler.finish("b")
    await waiting


async def test_load_is_spread_over_workers_within_one_heartbeat(mesh: Mesh) -> None:
    for name in ("decode-0", "decode-1", "prefill-0", "prefill-1"):
        await mesh.worker(name)
    scheduler = await mesh.scheduler()
    await scheduler.until_workers(4)
    answers = [await scheduler.place(name, 16) for name in ("a", "b", "c", "d")]
    assert sorted(answer.decode.name for answer in answers) == ["decode-0"] * 2 + ["decode-1"] * 2
    assert sorted(answer.prefill.name for answer in answers) == ["prefill-0"] * 2 + ["prefill-1"] * 2


async def test_a_full_line_is_refused_with_a_time_to_try_again(mesh: Mesh) -> None:
    await mesh.worker("decode-0")
    scheduler = await mesh.scheduler(queue_limit=1)
    await scheduler.place("running")
    waiting = asyncio.ensure_future(scheduler.place("waiting"))
    await scheduler.until_queued(1)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await scheduler.place("late")
    assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(failure.value.trailing_metadata() or ())
    assert int(trailing[RETRY_AFTER_KEY]) > 0
    await scheduler.finish("running")
    await waiting


async def test_a_cancelled_call_leaves_the_line(mesh: Mesh) -> None:
    await mesh.worker("decode-0")
    scheduler = await mesh.scheduler()
    await scheduler.place("running")
    gone = scheduler.place("gone")
    await scheduler.until_queued(1)
    next_one = asyncio.ensure_future(scheduler.place("next"))
    await scheduler.until_queued(2)
    gone.cancel()
    await scheduler.until_queued(1)
    await scheduler.finish("running")
    assert (await next_one).decode.name == "decode-0"


async def test_a_call_whose_deadline_passes_leaves_the_line(mesh: Mesh) -> None:
    await mesh.worker("decode-0")
    scheduler = await mesh.scheduler()
    await scheduler.place("running")
    assert await code_of(scheduler.place("late", timeout=0.3)) == grpc.StatusCode.DEADLINE_EXCEEDED
    await scheduler.until_queued(0)


async def test_two_schedulers_share_one_line(mesh: Mesh) -> None:
    await mesh.worker("decode-0")
    one, two = await mesh.scheduler(), await mesh.scheduler()
    await one.place("running")
    first = asyncio.ensure_future(one.place("first"))
    await one.until_queued(1)
    second = asyncio.ensure_future(two.place("second"))
    await two.until_queued(2)
    await two.finish("running")
    await first
    assert not second.done()
    await two.finish("first")
    await second


async def test_two_schedulers_never_overfill_a_worker_and_serve_everybody(mesh: Mesh) -> None:
    for name in ("decode-0", "decode-1"):
        await mesh.worker(name)
    schedulers = [await mesh.scheduler(), await mesh.scheduler()]
    for scheduler in schedulers:
        await scheduler.until_workers(2)
    running: dict[str, int] = {"decode-0": 0, "decode-1": 0}
    fullest = 0

    async def ask(index: int) -> None:
        nonlocal fullest
        scheduler, tokens = schedulers[index % 2], 16 * (1 + index % 4)
        answer = await scheduler.place(f"r{index}", tokens)
        running[answer.decode.name] += tokens
        assert running[answer.decode.name] <= TOKENS
        fullest = max(fullest, running[answer.decode.name])
        await schedulers[index % 3 % 2].listed()  # something takes a while
        running[answer.decode.name] -= tokens
        await schedulers[(index + 1) % 2].finish(f"r{index}")

    async with asyncio.TaskGroup() as group:
        for index in range(60):
            group.create_task(ask(index))
    assert fullest == TOKENS
    assert await mesh.store._run(["HLEN", "diptych:load"]) == 0


async def test_a_repeated_call_at_another_scheduler_keeps_the_place_of_one_that_died(mesh: Mesh) -> None:
    await mesh.worker("decode-0")
    two = await mesh.scheduler()
    await two.place("running")
    async with serving(SchedulerConfig(redis=mesh.redis_url, port=0)) as address:
        one = await mesh.stack.enter_async_context(client(address))
        first = asyncio.ensure_future(one.place("first"))
        await two.until_queued(1)
        owner = await mesh.store._run(["HGET", "diptych:line:tiny:owner", "first"])
        later = asyncio.ensure_future(two.place("later"))
        await two.until_queued(2)
        again = asyncio.ensure_future(two.place("first"))
        async with asyncio.timeout(WAIT_S):  # the new call owns the place: when the old scheduler stops, it is kept
            while await mesh.store._run(["HGET", "diptych:line:tiny:owner", "first"]) == owner:
                pass
    assert await code_of(first) == grpc.StatusCode.UNAVAILABLE
    await two.finish("running")
    await again
    assert not later.done()
    await two.finish("first")
    await later


async def test_a_worker_that_dies_in_front_of_the_line_is_replaced_by_the_next(mesh: Mesh) -> None:
    await mesh.worker("decode-0")
    scheduler = await mesh.scheduler()
    await scheduler.place("running")
    waiting = asyncio.ensure_future(scheduler.place("waiting"))
    await scheduler.until_queued(1)
    await mesh.kill("decode-0")
    await scheduler.until_workers(0)
    await mesh.worker("decode-1")
    assert (await waiting).decode.name == "decode-1"


async def test_what_a_dead_gateway_left_on_an_idle_worker_is_forgotten(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placer_module, "UNCLAIMED_AFTER_S", 0.2)
    await mesh.worker("decode-0", running=0)
    scheduler = await mesh.scheduler()
    await scheduler.place("lost")
    assert (await scheduler.place("next")).decode.name == "decode-0"


async def test_workers_and_waiting_requests_survive_an_emptied_redis(mesh: Mesh) -> None:
    await mesh.worker("decode-0")
    scheduler = await mesh.scheduler()
    await scheduler.place("running")
    waiting = asyncio.ensure_future(scheduler.place("waiting"))
    await scheduler.until_queued(1)
    await mesh.store._run(["FLUSHALL"])
    assert (await waiting).decode.name == "decode-0"  # nobody knows of the running one any more
    await scheduler.until_workers(1)


async def test_requests_are_placed_from_the_last_known_view_while_redis_is_away(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    async with AsyncExitStack() as stack:
        url = server.start()
        store = Store(url)
        stack.push_async_callback(store.aclose)
        mesh = Mesh(redis_url=url, store=store, stack=stack)
        await mesh.worker("decode-0")
        await mesh.worker("decode-1")
        scheduler = await mesh.scheduler()
        await scheduler.until_workers(2)
        await scheduler.place("running-0")
        await scheduler.place("running-1")
        waiting = asyncio.ensure_future(scheduler.place("waiting"))
        await scheduler.until_queued(1)
        server.stop()
        assert (await waiting).decode.name.startswith("decode")
        answers = [await scheduler.place(name) for name in ("a", "b")]
        again = await scheduler.place("b")
        assert again.transfer_id == answers[1].transfer_id
        await scheduler.finish("a")
        assert len((await scheduler.listed()).workers) == 2
        server.start()
        await scheduler.until_workers(2)
        async with asyncio.timeout(WAIT_S):
            while await store._run(["HLEN", "diptych:placed"]) != 1:  # the shared line is in use again
                await scheduler.finish("c")
                await scheduler.place("c")
    server.stop()


async def test_a_redis_that_hangs_delays_a_request_but_does_not_hold_it(
    mesh: Mesh, redis_server: EmbeddedRedis
) -> None:
    await mesh.worker("decode-0")
    scheduler = await mesh.scheduler()
    await scheduler.until_workers(1)
    assert redis_server.pid is not None
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(8):  # a client must have its answer within ten seconds
            assert (await scheduler.place("a")).decode.name == "decode-0"
        async with asyncio.timeout(1):  # who comes later does not wait for Redis again
            await scheduler.place("b")
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    await scheduler.finish("a")


async def test_list_workers_tells_everything(mesh: Mesh) -> None:
    latency = Latency(prefill=PrefillFit(a_s=0.01, b_s=1e-3, c_s=1e-7, chunk_tokens=256, error=0.05, steps=40))
    record = await mesh.worker("prefill-0", queued_tokens=9, waiting=2, state="draining", latency=latency)
    link = Link(
        peer="prefill-0", peer_incarnation=record.incarnation, lanes="tcp/lo", bytes_per_s=1e9, round_trip_s=3e-4
    )
    await mesh.worker("decode-0", links=(link,))
    scheduler = await mesh.scheduler()
    await scheduler.until_workers(2)
    decode, prefill = (await scheduler.listed()).workers
    assert list(decode.links) == [to_link(link)]
    assert (decode.links[0].bytes_per_s, decode.links[0].round_trip.ToMicroseconds()) == (1e9, 300)
    assert not prefill.links
    assert decode.ref.name == "decode-0"
    assert prefill.ref.incarnation == record.incarnation
    assert (prefill.role, prefill.state) == (worker_pb2.ROLE_PREFILL, worker_pb2.WORKER_STATE_DRAINING)
    assert (prefill.queued_tokens, prefill.running, prefill.waiting) == (9, 1, 2)
    assert prefill.blocks.total == prefill.blocks.free == TOKENS // 16
    assert prefill.heartbeat_age.ToMilliseconds() < 3000
    assert (latency_of(prefill), latency_of(decode)) == (latency, Latency())


@pytest.fixture
def scheduler_process(redis_url: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "services.scheduler", "--port", "0", "--redis", redis_url],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


async def test_the_process_serves_drains_and_ends_well(mesh: Mesh, scheduler_process: subprocess.Popen[str]) -> None:
    await mesh.worker("decode-0")
    assert scheduler_process.stderr is not None
    address = ""
    while not address:
        line = await asyncio.to_thread(scheduler_process.stderr.readline)
        assert line, "the process has ended"
        address = line.partition("listening on ")[2].strip()
    async with client(address) as scheduler:
        health = await scheduler.health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        await scheduler.until_workers(1)
        await scheduler.place("running")
        waiting = asyncio.ensure_future(scheduler.place("waiting"))
        await scheduler.until_queued(1)
        scheduler_process.send_signal(signal.SIGTERM)
        assert await code_of(waiting) == grpc.StatusCode.UNAVAILABLE
    assert await asyncio.to_thread(scheduler_process.wait, 10.0) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--redis", "redis://:secret@127.0.0.1:1/0"], "redis://:***@127.0.0.1:1/0 does not answer"),
        (["--redis", "http://127.0.0.1"], "is not a redis://"),
    ],
)
def test_a_process_that_cannot_reach_redis_says_so_in_one_line(flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "services.scheduler", "--port", "0", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert "secret" not in done.stderr


async def test_a_port_in_use_is_one_line(mesh: Mesh) -> None:
    async with serving(SchedulerConfig(redis=mesh.redis_url, port=0)) as address:
        port = address.rpartition(":")[2]
        command = [sys.executable, "-m", "services.scheduler", "--port", port, "--redis", mesh.redis_url]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
        )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("scheduler: cannot listen")
