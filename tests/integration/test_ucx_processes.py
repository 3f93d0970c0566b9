"""KV between two real processes over UCX, and what is left when one of them is killed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from ucx_peer import LineControl

from kvtransfer import Arena, KvLayout, Open, PeerLost, Receiver, TransferExpired, UcxTransport, overlapping

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAYOUT = KvLayout(model="m", dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=16)
ROOT = Path(__file__).parents[2]
OWN = "a" * 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transport():
    transport = UcxTransport(OWN)
    await transport.start()
    yield transport
    await transport.aclose()


async def until(condition, timeout_s: float = 10.0) -> None:
    """Lets the loop run until the condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.002)


@dataclasses.dataclass
class Peer:
    process: asyncio.subprocess.Process
    control: LineControl
    incarnation: str

    def opening(self, layout: KvLayout = LAYOUT) -> Open:
        return Open(
            transfer_id="t",
            sender_incarnation=self.incarnation,
            receiver_incarnation=OWN,
            layout=layout,
            skip_tokens=0,
        )

    async def result(self) -> dict:
        assert self.process.stdout is not None
        async with asyncio.timeout(10):
            while not (line := await self.process.stdout.readline()).startswith(b'{"bytes_sent"'):
                assert line, "the sender ended without a result"
            return json.loads(line)


@contextlib.asynccontextmanager
async def sending_process(
    tokens: int, computed: int, *, layout: KvLayout = LAYOUT, checksums: bool = False
) -> AsyncIterator[Peer]:
    incarnation = os.urandom(8).hex()
    options = {
        "layout": dataclasses.asdict(layout),
        "incarnation": incarnation,
        "tokens": tokens,
        "computed": computed,
        "checksums": checksums,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("ucx_peer.py")),
        json.dumps(options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT), "UCX_LOG_LEVEL": os.environ.get("UCX_LOG_LEVEL", "fatal")},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(20):
            while (line := await process.stdout.readline()) != b"ready\n":
                assert line.startswith(b"["), line  # UCX logs to stdout
        yield Peer(process, LineControl(process.stdout, process.stdin.write), incarnation)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


async def whole_transfer(transport: UcxTransport, tokens: int, **options) -> None:
    arena = Arena(LAYOUT, -(-tokens // LAYOUT.block_tokens))
    receiver = Receiver(transport, arena)
    before = transport.counters.bytes_received
    async with sending_process(tokens, tokens, **options) as peer:
        received = await receiver.pull(
            peer.control, peer.opening(), block_ids=range(arena.blocks), tokens=tokens, timeout_s=20.0
        )
        result = await peer.result()
    await receiver.aclose()
    assert received.first_token_id == 11
    assert received.bytes == result["bytes_sent"] == transport.counters.bytes_received - before == tokens * 23_040
    assert hashlib.sha256(arena.array).hexdigest() == result["hash"]
    assert received.gigabytes_per_second > 0


@pytest.mark.parametrize("checksums", [False, True])
async def test_bytes_cross_processes_unchanged_and_are_counted(transport, checksums):
    await whole_transfer(transport, 1024, checksums=checksums)


async def test_shards_of_several_processes_meet_in_the_blocks_of_one(transport):
    """Two heads and one, of blocks of 16 and of 32 tokens, become three heads in blocks of 24."""
    tokens, own = 300, dataclasses.replace(LAYOUT, block_tokens=24)
    shards = [
        dataclasses.replace(LAYOUT, head_end=2),
        dataclasses.replace(LAYOUT, head_begin=2, block_tokens=32),
    ]
    arena = Arena(own, 13)
    receiver = Receiver(transport, arena)
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as pulls:
        peers = [await stack.enter_async_context(sending_process(tokens, tokens, layout=layout)) for layout in shards]
        tasks = [
            pulls.create_task(
                receiver.pull(
                    peers[index].control,
                    peers[index].opening(own),
                    block_ids=range(13),
                    tokens=tokens,
                    timeout_s=20.0,
                    area=area,
                )
            )
            for index, area in overlapping(own, shards).items()
        ]
    assert sum(task.result().bytes for task in tasks) == tokens * LAYOUT.token_bytes
    await receiver.aclose()
    received = arena.array.reshape(30, 2, -1, 3, 64)
    for layout in shards:
        size, heads = layout.block_tokens, slice(layout.head_begin, layout.head_end)
        shape = (30, 2, -(-tokens // size), size, layout.local_heads, 64)
        sent = np.random.default_rng(5).integers(0, 60_000, shape).reshape(30, 2, -1, layout.local_heads, 64)
        np.testing.assert_array_equal(received[:, :, :tokens, heads], sent[:, :, :tokens])
    assert (received[:, :, tokens:] == 0).all()


@pytest.mark.parametrize("computed", [0, 300])
async def test_a_killed_sender_is_a_lost_peer_within_two_seconds_and_others_are_served(transport, computed):
    """L1, in mid-transfer."""
    arena = Arena(LAYOUT, 64)
    receiver = Receiver(transport, arena)
    async with sending_process(1024, computed) as peer:
        before = transport.counters.messages_received
        pull = asyncio.ensure_future(
            receiver.pull(peer.control, peer.opening(), block_ids=range(64), tokens=1024, timeout_s=30.0)
        )
        await until(
            lambda: transport.counters.messages_received - before >= computed // 128 and receiver.staging_out >= 4
        )
        peer.process.kill()
        killed = time.monotonic()
        with pytest.raises(PeerLost):
            await pull
        assert time.monotonic() - killed < 2.0
    await receiver.drained()
    assert receiver.staging_out == receiver.quarantined == 0
    await receiver.aclose()
    await whole_transfer(transport, 112)


async def test_a_stopped_sender_is_given_up_at_the_deadline_and_drains(transport):
    """UCX does not see a stopped peer: the deadline ends the pull, and the abort of the endpoint ends its receives."""
    arena = Arena(LAYOUT, 64)
    receiver = Receiver(transport, arena)
    async with sending_process(1024, 300) as peer:
        pull = asyncio.ensure_future(
            receiver.pull(peer.control, peer.opening(), block_ids=range(64), tokens=1024, timeout_s=1.5)
        )
        before = transport.counters.messages_received
        await until(lambda: transport.counters.messages_received - before >= 2)
        peer.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransferExpired):
            await pull
        async with asyncio.timeout(15):
            await receiver.drained()
    assert receiver.staging_out == receiver.quarantined == 0
    await receiver.aclose()


async def test_an_address_of_a_dead_process_is_a_lost_peer(transport):
    code = (
        "import asyncio, sys\nfrom kvtransfer import UcxTransport\n"
        "async def main():\n t = UcxTransport('b' * 16)\n await t.start()\n print(t.address.hex())\n await t.aclose()\n"
        "asyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    async with asyncio.timeout(20):
        output, _ = await process.communicate()
    assert process.returncode == 0, "a process that closes its transport ends by itself"
    with pytest.raises(PeerLost):
        await transport.connect(bytes.fromhex(output.decode()), 5.0)


@pytest.mark.parametrize("setting", ["UCX_TLS", "UCX_NET_DEVICES"])
async def test_an_unusable_ucx_is_one_clear_error(setting):
    code = (
        "import asyncio\nfrom kvtransfer import TransportUnavailable, UcxTransport\n"
        "async def main():\n try: await UcxTransport('b' * 16).start()\n"
        " except TransportUnavailable as error: print(error)\n"
        "asyncio.run(main())"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), setting: "bogus"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    async with asyncio.timeout(20):
        output, _ = await process.communicate()
    assert process.returncode == 0
    lines = [line for line in output.decode().splitlines() if not line.startswith("[")]  # UCX logs to stdout
    assert len(lines) == 1
    assert f"{setting}=bogus" in lines[0]
