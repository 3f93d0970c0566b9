"""Asking a mesh over native gRPC, and looking at its workers: what the tests here share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio
from diptych.v1 import gateway_pb2, gateway_pb2_grpc, request_pb2, scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from meshes import Mesh

LIMIT_S = 100.0


@dataclass(kw_only=True)
class Answer:
    """What a client got."""

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: gateway_pb2.Finish | None = None
    messages: int = 0

    @property
    def phases(self) -> request_pb2.Phases:
        """Phases of a finished answer."""
        assert self.finish is not None
        return self.finish.phases


def request(prompt: Sequence[int] | str, **fields: object) -> gateway_pb2.GenerateRequest:
    """A GenerateRequest for token ids or text."""
    made = gateway_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.ids.extend(prompt)
    return made


async def ask(
    mesh: Mesh,
    asked: gateway_pb2.GenerateRequest,
    *,
    limit_s: float = LIMIT_S,
    metadata: Sequence[tuple[str, str]] = (),
    after: Callable[[Answer], None] = lambda answer: None,
) -> Answer:
    """Asks and collects the whole answer; raises AioRpcError as a client would see it.

    `after` is called with what is there after each message.
    """
    answer = Answer()
    async with grpc.aio.insecure_channel(mesh.grpc) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(asked, timeout=limit_s, metadata=metadata)
        async for message in call:
            answer.messages += 1
            answer.request_id = answer.request_id or message.request_id
            answer.text += message.text
            answer.token_ids += message.token_ids
            if message.HasField("finish"):
                assert answer.finish is None
                answer.finish = message.finish
            after(answer)
    return answer


async def workers(mesh: Mesh) -> Sequence[worker_pb2.WorkerView]:
    """Live workers as the scheduler sees them."""
    async with grpc.aio.insecure_channel(mesh.scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return (await stub.ListWorkers(scheduler_pb2.ListWorkersRequest(), timeout=5)).workers


async def everything_is_free(mesh: Mesh) -> bool:
    """Whether every worker holds nothing, by its own accounting, and no request waits anywhere."""
    async with grpc.aio.insecure_channel(mesh.scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        view = await stub.ListWorkers(scheduler_pb2.ListWorkersRequest(), timeout=5)
    for worker in view.workers:
        blocks = worker.blocks
        assert blocks.free + blocks.held + blocks.leased + blocks.swapped == blocks.total
    idle = all(
        w.blocks.free == w.blocks.total and not (w.running or w.waiting or w.queued_tokens) for w in view.workers
    )
    return bool(view.workers) and idle and view.queued_requests == 0


async def until_free(mesh: Mesh, *, limit_s: float = 15.0) -> None:
    """Waits until everything is free; fails the test when it is not in time."""
    import asyncio

    deadline_s = asyncio.get_running_loop().time() + limit_s
    while not await everything_is_free(mesh):
        assert asyncio.get_running_loop().time() < deadline_s, f"still in use: {await workers(mesh)}"
        await asyncio.sleep(0.2)
