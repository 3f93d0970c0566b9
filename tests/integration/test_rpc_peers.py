"""What our servers say to a peer that sends rubbish, and our channels to one that stands still."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from diptych.v1 import gateway_pb2, gateway_pb2_grpc

from services.rpc.channels import Channels
from services.rpc.options import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS
from services.rpc.server import RpcServer

GENERATE = "/diptych.v1.GatewayService/Generate"
LIST_MODELS = "/diptych.v1.GatewayService/ListModels"

ENDLESS_PEER = """
import asyncio
from diptych.v1 import gateway_pb2, gateway_pb2_grpc
from services.rpc.server import RpcServer

class Endless(gateway_pb2_grpc.GatewayServiceServicer):
    async def Generate(self, request, context):
        while True:
            yield gateway_pb2.GenerateResponse(text="x")
            await asyncio.sleep(0.05)

async def main():
    server = RpcServer("127.0.0.1", 0, [])
    server.add(gateway_pb2_grpc.add_GatewayServiceServicer_to_server, Endless())
    port = server.bind()
    await server.start()
    print(port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Echo(gateway_pb2_grpc.GatewayServiceServicer):
    async def Generate(  # noqa: N802 - the name in the proto
        self, request: gateway_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        yield gateway_pb2.GenerateResponse(text=request.text)

    async def ListModels(  # noqa: N802 - the name in the proto
        self, request: gateway_pb2.ListModelsRequest, context: object
    ) -> gateway_pb2.ListModelsResponse:
        return gateway_pb2.ListModelsResponse()


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer("127.0.0.1", 0, [])
    server.add(gateway_pb2_grpc.add_GatewayServiceServicer_to_server, Echo())
    port = server.bind()
    await server.start()
    channels = Channels()
    yield channels.to(f"127.0.0.1:{port}")
    await channels.aclose()
    await server.stop(0)


@pytest.mark.parametrize("rubbish", [b"\xff" * 100, b"\x12\x02\xff\xfe", b"\x12\xff"], ids=["wire", "utf-8", "cut"])
async def test_a_message_that_cannot_be_read_is_bad_input_and_no_traceback(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, rubbish: bytes
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(grpc.aio.AioRpcError) as streamed:
        async for _ in channel.unary_stream(GENERATE)(rubbish, timeout=5):
            pass
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await channel.unary_unary(LIST_MODELS)(b"\xff" * 100, timeout=5)
    for raised in (streamed, unary):
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be read" in str(raised.value.details())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]


async def test_a_message_that_can_be_read_reaches_the_servicer(channel: grpc.aio.Channel) -> None:
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    texts = [answer.text async for answer in stub.Generate(gateway_pb2.GenerateRequest(text="hi"), timeout=5)]
    assert texts == ["hi"]
    assert await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=5) == gateway_pb2.ListModelsResponse()


async def test_a_peer_that_stands_still_in_mid_stream_is_unavailable_within_the_keepalive_times() -> None:
    """A stopped process keeps its socket open: its kernel acknowledges everything."""
    peer = await asyncio.create_subprocess_exec(sys.executable, "-c", ENDLESS_PEER, stdout=asyncio.subprocess.PIPE)
    channels = Channels()
    try:
        assert peer.stdout is not None
        port = int(await asyncio.wait_for(peer.stdout.readline(), 30))
        stub = gateway_pb2_grpc.GatewayServiceStub(channels.to(f"127.0.0.1:{port}"))
        call = stub.Generate(gateway_pb2.GenerateRequest(text="x"), timeout=60)
        assert await call.read() != grpc.aio.EOF
        peer.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async with asyncio.timeout((KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS) / 1000 + 3):
                while await call.read() != grpc.aio.EOF:
                    pass
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        peer.kill()
        await peer.wait()
        await channels.aclose()
