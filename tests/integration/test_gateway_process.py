"""The gateway as a process of its own, and without its scheduler."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from diptych.v1 import gateway_pb2, gateway_pb2_grpc, scheduler_pb2_grpc
from gateway_peers import LENGTH, decoding, ids, scene, tokens
from tiny_models import make_tiny

from services.gateway import peers
from services.rpc.server import RpcServer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny("llama", folder)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def gateway(model: Path | str, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "services.gateway", "--model", str(model), *more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_alive(url: str, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the gateway does not answer")


def test_it_starts_alone_says_that_it_is_not_ready_refuses_and_drains(model: Path) -> None:
    grpc_port, http_port, nobody = free_port(), free_port(), free_port()
    url = f"http://127.0.0.1:{http_port}"
    flags = ("--port", str(grpc_port), "--http-port", str(http_port), "--scheduler", f"127.0.0.1:{nobody}")
    with gateway(model, *flags) as process:
        wait_until_alive(url)
        assert httpx.get(f"{url}/ready").status_code == 503
        bad = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 99_999})
        assert bad.status_code == 400 and "is over the context of" in bad.json()["error"]["message"]
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            with pytest.raises(grpc.RpcError) as raised:
                list(stub.Generate(gateway_pb2.GenerateRequest(text="hi"), timeout=20))
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_a_port_in_use_is_one_clear_line(model: Path, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other = "--http-port" if flag == "--port" else "--port"
        port = taken.getsockname()[1]
        with gateway(model, flag, str(port), other, "0") as process:
            _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.strip().splitlines()[-1].startswith(f"gateway: cannot listen on 127.0.0.1:{port}")
    assert "Traceback" not in errors


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    with gateway(tmp_path / "nowhere", "--port", "0", "--http-port", "0") as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and "nowhere" in errors.strip().splitlines()[-1] and "Traceback" not in errors


async def test_a_scheduler_that_comes_back_serves_the_request_that_waited() -> None:
    async with scene() as world:
        world.scheduler.pairs = [(None, world.decode)]
        world.decode.decodes = [decoding(tokens(0, ids("Hello"), LENGTH)) for _ in range(2)]
        request = gateway_pb2.GenerateRequest(text="hi")
        assert [m async for m in world.stub.Generate(request, timeout=20)]
        port = world.scheduler_port
        await world.servers["scheduler"].stop(0.0)
        answering = asyncio.ensure_future(_collect(world.stub.Generate(request, timeout=20)))
        await asyncio.sleep(0.3)  # the request finds nobody; that it comes too late would only make the test easier
        assert not answering.done()
        world.servers["scheduler"] = RpcServer("127.0.0.1", port, [])
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(world.scheduler, world.servers["scheduler"].server)
        world.servers["scheduler"].bind()
        await world.servers["scheduler"].start()
        messages = await answering
        assert "".join(message.text for message in messages) == "Hello"
        assert world.scheduler.placed[-1].attempt == 1, "the same placement, asked for again"


async def test_without_a_scheduler_the_client_has_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SCHEDULER_AWAY_S", 0.5)
    async with scene() as world:
        await world.servers["scheduler"].stop(0.0)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _collect(world.stub.Generate(gateway_pb2.GenerateRequest(text="hi"), timeout=20))
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


async def _collect(call: grpc.aio.UnaryStreamCall) -> list[gateway_pb2.GenerateResponse]:
    return [message async for message in call]
