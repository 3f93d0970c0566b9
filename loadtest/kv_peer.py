"""A process that hands KV over as a prefill worker does, and computes nothing: `python -m loadtest.kv_peer`.

It offers t0, t1, t2, … of TOKENS tokens each, AHEAD of them at a time, over the workers' own gRPC service and UCX;
whenever one is released, the next is offered. It ends when its stdin does, so never later than whoever started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psutil

from kvtransfer import Arena, BlockPool, KvLayout, Sender, UcxTransport
from services.prefill.servicer import KvTransferServicer
from services.rpc.server import RpcServer
from services.worker.identity import Identity

LAYOUT: Final = KvLayout(model="soak", dtype="bf16", layers=2, kv_heads=2, head_dim=64, block_tokens=16)
TOKENS: Final = 300
"""Three pieces, the last one in part: 307 kB."""

BLOCKS: Final = 19
AHEAD: Final = 16
FIRST_TOKEN: Final = 42
CONTENT: Final = 7
"""Every element of the KV."""


class Offers:
    """Keeps AHEAD offers up. The KV is the same for all of them: the blocks of one sequence, shared."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._pool = BlockPool(BLOCKS * AHEAD)
        self._numbers = itertools.count()

    def top_up(self) -> None:
        """Offers what is missing."""
        while self._pool.can_allocate(BLOCKS):
            name = f"t{next(self._numbers)}"
            blocks = self._pool.allocate(BLOCKS, name)
            self._pool.lease(name)
            offer = self._sender.offer(name, TOKENS, blocks, 600.0, self._released)
            offer.advance(TOKENS)
            offer.finish(FIRST_TOKEN)

    def _released(self, name: str) -> None:
        self._pool.free(name)
        asyncio.get_running_loop().call_soon(self.top_up)


async def serve() -> None:
    """Runs until stdin ends."""
    rpc = RpcServer("127.0.0.1", 0, [KvTransferServicer.NAME])
    identity = Identity("kv-peer", f"127.0.0.1:{rpc.bind()}")
    transport = UcxTransport(identity.incarnation)
    await transport.start()
    arena = Arena(LAYOUT, BLOCKS * AHEAD)
    arena.array[...] = CONTENT
    sender = Sender(transport, arena, incarnation=identity.incarnation, checksums=True)
    KvTransferServicer(sender, identity).register(rpc)
    await rpc.start()
    Offers(sender).top_up()
    print(f"ready {identity.address} {identity.incarnation}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # an idle process of a load test: nothing of it is worth taking apart


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPeer:
    """A running one."""

    name: str
    address: str
    incarnation: str
    process: psutil.Process


@contextlib.contextmanager
def kv_peers(count: int) -> Iterator[list[KvPeer]]:
    """Starts `count` of them and ends them afterwards. RuntimeError: one did not come up."""
    command = [sys.executable, "-m", "loadtest.kv_peer"]
    with contextlib.ExitStack() as stack:
        children = []
        for _ in range(count):
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(child)
            stack.callback(child.kill)
            children.append(child)
        yield [_ready(child) for child in children]


def _ready(child: subprocess.Popen[str]) -> KvPeer:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("ready "):  # UCX logs to stdout, too
            _, address, incarnation = line.split()
            process = psutil.Process(child.pid)
            return KvPeer(name=f"peer-{child.pid}", address=address, incarnation=incarnation, process=process)
    raise RuntimeError(f"a peer ended with status {child.wait()} before it was ready")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(serve())
