"""Any process killed with SIGKILL in mid-request: an answer or an error status in 10 s, and the mesh serves on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext

import grpc
import grpc.aio
import httpx
import psutil
import pytest
from asking import LIMIT_S, Answer, ask, request, until_free
from meshes import Mesh, StartMesh

NOTICE_S = 10.0
LONG = 600  # tokens
BEGUN = 10  # tokens of a request that is decoding
ERRORS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL)


async def outcome(
    mesh: Mesh, killed: asyncio.Event, prompt: list[int], max_tokens: int, begun: asyncio.Event | None = None
) -> tuple[Answer | grpc.StatusCode, float]:
    """What the client of a long request got, and when it knew. `begun` is set when it has the first of it."""

    def look(so_far: Answer) -> None:
        if begun is not None and len(so_far.token_ids) >= BEGUN:
            begun.set()

    try:
        wish = request(prompt, max_tokens=max_tokens, ignore_eos=True)
        answer: Answer | grpc.StatusCode = await ask(mesh, wish, after=look)
    except grpc.aio.AioRpcError as error:
        answer = error.code()
    assert killed.is_set(), "the request was over before the kill: it proves nothing"
    return answer, time.monotonic()


@contextmanager
def nobody_starts_it_again(mesh: Mesh) -> Iterator[None]:
    """A worker that is back within three seconds goes on with an answer: what is told without it needs it away."""
    up = psutil.Process(mesh.pid)
    up.suspend()
    try:
        yield
    finally:
        up.resume()


async def serves_again(mesh: Mesh) -> Answer:
    """Asks until it is answered; the killed process has 40 s to come back."""
    deadline_s = time.monotonic() + 40
    while True:
        try:
            return await ask(mesh, request([5, 6, 7], max_tokens=4, ignore_eos=True), limit_s=10)
        except grpc.aio.AioRpcError:
            assert time.monotonic() < deadline_s, "the mesh did not come back"
            await asyncio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_whoever_is_killed_in_mid_request_nobody_hangs_and_the_mesh_comes_back(start_mesh: StartMesh) -> None:
    """L1, in mid-stream."""
    mesh = start_mesh()
    expected = (await ask(mesh, request([3, 4, 5] * 20, max_tokens=LONG, ignore_eos=True))).token_ids
    short = (await ask(mesh, request([5, 6, 7], max_tokens=4, ignore_eos=True))).token_ids
    for name in ("decode-0", "prefill-0", "scheduler", "gateway", "redis"):
        killed, begun = asyncio.Event(), asyncio.Event()
        process = mesh.children()[name]
        asked = asyncio.create_task(outcome(mesh, killed, [3, 4, 5] * 20, LONG, begun))
        await asyncio.wait_for(begun.wait(), LIMIT_S)
        killed.set()
        at_s = time.monotonic()
        with nobody_starts_it_again(mesh) if name in ("decode-0", "prefill-0") else nullcontext():
            process.kill()
            got, noticed_s = await asked
            if name == "prefill-0":  # until it is back decode prefills by itself
                alone = await serves_again(mesh)
                assert alone.token_ids == short
                assert alone.phases.local_prefill_reason and not alone.phases.transfer.bytes
        if isinstance(got, Answer):
            assert got.token_ids == expected, f"{name} was killed and the answer changed"
            assert name in ("prefill-0", "scheduler", "redis")
        else:
            assert got in ERRORS
            assert noticed_s - at_s < NOTICE_S, f"{name} was killed and nobody was told for {noticed_s - at_s:.1f} s"
        again = await serves_again(mesh)
        assert again.token_ids == short
        mesh.wait_for(lambda name=name, old=process.pid: mesh.children().get(name, psutil.Process()).pid != old)  # type: ignore[misc]
        mesh.wait_for(lambda: httpx.get(f"{mesh.http}/ready").status_code == 200)
        await until_free(mesh)
    last = await ask(mesh, request([3, 4, 5] * 20, max_tokens=60, ignore_eos=True))
    assert last.token_ids == expected[:60]


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_prefill_worker_killed_while_it_computes_costs_an_error_or_another_placement(
    start_mesh: StartMesh,
) -> None:
    """L1, in mid-transfer."""
    mesh = start_mesh(extra=["--chunk-tokens=1"])  # a prompt takes seconds
    killed = asyncio.Event()
    asked = asyncio.create_task(outcome(mesh, killed, [7 + i % 300 for i in range(1300)], 20))
    await asyncio.sleep(0.5)
    killed.set()
    at_s = time.monotonic()
    mesh.kill("prefill-0")
    got, noticed_s = await asked
    if isinstance(got, Answer):
        assert got.phases.placements == 2
        assert got.phases.local_prefill_reason
        assert got.phases.transfer.bytes == 0
    else:
        assert got in ERRORS
        assert noticed_s - at_s < NOTICE_S


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_stream_over_http_whose_decode_worker_dies_ends_with_an_error_and_without_done(
    start_mesh: StartMesh,
) -> None:
    mesh = start_mesh()
    decode = mesh.children()["decode-0"]  # looked up before: the answer may end while the processes are listed
    body = {"model": "tiny-llama", "prompt": [3, 4, 5], "stream": True}
    body |= {"max_tokens": 2000, "ignore_eos": True}
    lines: list[str] = []
    at_s = 0.0
    async with (
        httpx.AsyncClient(timeout=60) as client,
        AsyncExitStack() as stack,
        client.stream("POST", f"{mesh.http}/v1/completions", json=body) as reply,
    ):
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            lines.append(line)
            if len(lines) == 20:
                at_s = time.monotonic()
                stack.enter_context(nobody_starts_it_again(mesh))
                decode.kill()
    assert at_s and time.monotonic() - at_s < NOTICE_S
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "data: [DONE]" not in lines
    assert events[-1]["error"]["message"]
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
