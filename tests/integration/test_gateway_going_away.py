"""Clients that go away in the middle (routine: no error, no traceback in the log), and a gateway that does."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable

import grpc.aio
import httpx
import pytest
from diptych.v1 import gateway_pb2, gateway_pb2_grpc
from gateway_peers import Scene, endless_decode, ids, scene, tokens

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def world() -> AsyncIterator[Scene]:
    async with scene() as built:
        built.scheduler.pairs = [(None, built.decode)]
        yield built


async def send(world: Scene, body: bytes, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = world.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("not reached in time")


def complaints(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_in_its_answer(
    world: Scene, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO)
    world.decode.decodes = [endless_decode(tokens(0, ids("Hello")))]
    body = json.dumps(CHAT | {"stream": stream}).encode()
    reader, writer = await send(world, body, len(body))
    if stream:
        await asyncio.wait_for(reader.readuntil(b"Hello"), 5)
    else:
        await asyncio.wait_for(world.decode.begun.wait(), 5)
    writer.close()
    await until(lambda: "the client went away" in caplog.text)
    assert await asyncio.wait_for(world.decode.ended.get(), 5) == "decode"
    assert not complaints(caplog)


async def test_a_client_that_goes_away_before_its_whole_body_has_come(
    world: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _, writer = await send(world, b'{"model"', 500)
    writer.close()
    await until(lambda: "the client went away" in caplog.text)
    assert not complaints(caplog)


async def test_a_gateway_that_cuts_an_answer_off_is_unavailable_and_not_cancelled(world: Scene) -> None:
    world.decode.decodes = [endless_decode(tokens(0, ids("Hello")))] * 2
    async with (
        httpx.AsyncClient(base_url=world.http, timeout=20) as http,
        grpc.aio.insecure_channel(world.grpc) as channel,
    ):
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(gateway_pb2.GenerateRequest(text="hi"), timeout=20)
        assert (await call.read()).text == "Hello"
        asking = asyncio.ensure_future(http.post(PATH, json=CHAT))
        await until(lambda: "diptych_requests_in_flight 2.0" in world.gateway.mesh.metrics.exposition().decode())
        await world.gateway.drain(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in str(raised.value.details())
        assert (await asking).status_code == 503
