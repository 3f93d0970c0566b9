"""Clients that go away, in every phase, and clients that ask for nonsense: all is freed, the next answer is right."""

from __future__ import annotations

import asyncio
import random
import time

import grpc
import grpc.aio
import httpx
import pytest
from asking import ask, request, until_free
from diptych.v1 import gateway_pb2_grpc
from google.protobuf.duration_pb2 import Duration
from meshes import Mesh, StartMesh

PROMPT = [3 + i % 300 for i in range(300)]


async def go_away_after(mesh: Mesh, seconds: float, **fields: object) -> None:
    """Starts a long answer and cancels it, wherever it is then."""
    async with grpc.aio.insecure_channel(mesh.grpc) as channel:
        asked = request(PROMPT, max_tokens=1700, ignore_eos=True, **fields)
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(asked, timeout=60)

        async def read() -> None:
            async for _ in call:
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(seconds)
        call.cancel()
        await asyncio.wait([reading])


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_disconnects_in_every_phase_leak_nothing_and_the_next_request_is_right(start_mesh: StartMesh) -> None:
    """K1. A small pool and small chunks make every phase last: queued, prefilling, sending, received, decoding."""
    mesh = start_mesh(extra=["--kv-mib=1", "--chunk-tokens=16"])
    expected = await ask(mesh, request(PROMPT, max_tokens=20, ignore_eos=True))
    rng = random.Random(7)
    for _ in range(3):
        await asyncio.gather(*(go_away_after(mesh, rng.uniform(0.0, 2.0)) for _ in range(10)))
        await until_free(mesh)
        answer = await ask(mesh, request(PROMPT, max_tokens=20, ignore_eos=True))
        assert answer.token_ids == expected.token_ids


async def test_a_cancel_stops_the_work_within_a_moment(mesh: Mesh) -> None:
    """G10, streamed."""
    await go_away_after(mesh, 1.0)
    begin_s = time.monotonic()
    await until_free(mesh, limit_s=5)  # the scheduler's news of a worker is up to a second old
    assert time.monotonic() - begin_s < 5


async def test_an_http_client_that_hangs_up_unstreamed_frees_everything(mesh: Mesh) -> None:
    """G10, unstreamed: nothing is ever written to the connection, so only the disconnect can be noticed."""
    body = {"model": "tiny-llama", "prompt": PROMPT}
    body |= {"max_tokens": 1700, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=0.7) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(f"{mesh.http}/v1/completions", json=body)
    await until_free(mesh, limit_s=5)


async def test_a_deadline_ends_the_request_with_its_own_status_and_frees_everything(mesh: Mesh) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await ask(mesh, request(PROMPT, max_tokens=1700, ignore_eos=True, deadline=Duration(nanos=700_000_000)))
    assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await ask(mesh, request(PROMPT, max_tokens=1700, ignore_eos=True), limit_s=0.7)
    assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until_free(mesh, limit_s=5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 5000}, r"max_tokens.*2048"),
        ({"sampling": {"temperature": float("nan")}}, "temperature"),
        ({"sampling": {"temperature": -1.0}}, "temperature"),
        ({"sampling": {"top_p": 0.0}}, "top_p"),
        ({"sampling": {"top_p": 2.0}}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"deadline": Duration(seconds=-1)}, "deadline"),
    ],
)
async def test_bad_input_is_refused_before_anything_is_streamed(
    mesh: Mesh, fields: dict[str, object], named: str
) -> None:
    """G1, G9: the field and its limit are in the message."""
    with pytest.raises(grpc.aio.AioRpcError, match=f"(?s){named}") as failed:
        await ask(mesh, request([5, 6, 7], **fields))
    assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("prompt", ["", [], [400]])
async def test_a_prompt_that_is_none_is_refused_and_the_mesh_stays_up(mesh: Mesh, prompt: str | list[int]) -> None:
    """G8."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await ask(mesh, request(prompt, max_tokens=3))
    assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await ask(mesh, request([5], max_tokens=3, ignore_eos=True))).token_ids


async def test_an_unknown_model_is_not_found(mesh: Mesh) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="gpt-9") as failed:
        await ask(mesh, request([5, 6, 7], model="gpt-9"))
    assert failed.value.code() == grpc.StatusCode.NOT_FOUND


async def test_two_live_requests_with_the_same_client_id_are_both_served(mesh: Mesh) -> None:
    """G5."""
    asked = [request([5, 6, 7 + i], max_tokens=20, ignore_eos=True, client_request_id="mine") for i in range(2)]
    first, second = await asyncio.gather(*(ask(mesh, one) for one in asked))
    assert first.finish is not None and second.finish is not None
    assert first.finish.client_request_id == second.finish.client_request_id == "mine"
    assert len(first.token_ids) == len(second.token_ids) == 20
    assert first.token_ids != second.token_ids
