"""Two sides of transfers in one process, for tests: queues instead of a network stream between them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np

from kvtransfer import (
    Arena,
    BlockPool,
    KvLayout,
    MemoryTransport,
    Message,
    Open,
    PeerLost,
    Received,
    Receiver,
    Sender,
    TransferAborted,
    TransferError,
    UcxTransport,
)
from kvtransfer.transport.fault import parse_fault
from kvtransfer.transport.faulty import FaultyTransport

SENDER, RECEIVER = "5e4de4" + "0" * 10, "4ece17e4" + "0" * 8
LAYOUT = KvLayout(model="m", dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=16)


class QueueControl:
    """One end of an in-process control stream."""

    def __init__(self, incoming: asyncio.Queue, outgoing: asyncio.Queue) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self.closed = False
        self.ended = asyncio.Event()
        self.said: list[Message] = []

    async def send(self, message: Message) -> None:
        if self.closed:
            raise PeerLost("the stream is closed")
        self.said.append(message)
        self._outgoing.put_nowait(message)

    async def receive(self) -> Message | None:
        item = await self._incoming.get()
        if isinstance(item, TransferError):
            raise item
        return item

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._outgoing.put_nowait(None)

    async def aclose(self) -> None:
        await self.close()
        self.ended.set()

    def fail(self, error: TransferError) -> None:
        """What a servicer does with an error: it becomes the end of the stream, for the peer."""
        self.closed = True
        self._outgoing.put_nowait(error)


def control_pair() -> tuple[QueueControl, QueueControl]:
    there, back = asyncio.Queue(), asyncio.Queue()
    return QueueControl(back, there), QueueControl(there, back)


@dataclass
class Side:
    transport: MemoryTransport | UcxTransport
    arena: Arena
    pool: BlockPool


@dataclass
class Pair:
    """A sending and a receiving worker."""

    source: Side
    target: Side
    sender: Sender
    receiver: Receiver
    released: list[str] = field(default_factory=list)
    served: list[asyncio.Task] = field(default_factory=list)
    controls: list[tuple[QueueControl, QueueControl]] = field(default_factory=list)

    def fill(self, transfer_id: str, tokens: int, seed: int = 1) -> np.ndarray:
        """Random KV of a sequence in the source's blocks; returns it as (layers, 2, tokens, heads, dim)."""
        layout = self.source.arena.layout
        blocks = self.source.pool.allocate(-(-tokens // layout.block_tokens), transfer_id)
        return write_kv(self.source.arena, blocks, tokens, seed)

    def offer(self, transfer_id: str, tokens: int, limit_s: float = 20.0):
        blocks = self.source.pool.blocks(transfer_id)
        self.source.pool.lease(transfer_id)

        def on_released(which: str) -> None:
            self.released.append(which)
            self.source.pool.free(which)

        return self.sender.offer(transfer_id, tokens, blocks, limit_s, on_released)

    def opening(self, transfer_id: str, skip_tokens: int = 0, **changes) -> Open:
        values = {
            "transfer_id": transfer_id,
            "sender_incarnation": SENDER,
            "receiver_incarnation": RECEIVER,
            "layout": self.target.arena.layout,
            "skip_tokens": skip_tokens,
        }
        return Open(**(values | changes))

    def start_serving(self, timeout_s: float = 10.0) -> QueueControl:
        """Serves one pull in a task; returns the receiver's end of its control stream."""
        receiving, sending = control_pair()
        self.controls.append((receiving, sending))

        async def serve() -> None:
            try:
                await self.sender.serve(sending, timeout_s)
                await sending.close()
            except TransferError as error:
                sending.fail(error)
            except asyncio.CancelledError:
                sending.fail(TransferAborted("the call was cancelled"))
                raise

        self.served.append(asyncio.ensure_future(serve()))
        return receiving

    async def pull(
        self, transfer_id: str, tokens: int, *, skip_tokens: int = 0, timeout_s: float = 10.0, blocks=None, **changes
    ) -> Received:
        if blocks is None:
            size = self.target.arena.layout.block_tokens
            blocks = self.target.pool.allocate(-(-tokens // size), transfer_id)
        return await self.receiver.pull(
            self.start_serving(timeout_s),
            self.opening(transfer_id, skip_tokens, **changes),
            block_ids=blocks,
            tokens=tokens,
            timeout_s=timeout_s,
        )

    def received(self, transfer_id: str, tokens: int) -> np.ndarray:
        return read_kv(self.target.arena, self.target.pool.blocks(transfer_id), tokens)


def write_kv(arena: Arena, blocks, tokens: int, seed: int) -> np.ndarray:
    layout = arena.layout
    shape = (layout.local_layers, 2, tokens, layout.local_heads, layout.head_dim)
    kv = np.random.default_rng(seed).integers(1, 60_000, shape).astype(arena.array.dtype)
    for token in range(tokens):
        arena.array[:, :, blocks[token // layout.block_tokens], token % layout.block_tokens] = kv[:, :, token]
    return kv


def read_kv(arena: Arena, blocks, tokens: int) -> np.ndarray:
    size = arena.layout.block_tokens
    return np.stack([arena.array[:, :, blocks[t // size], t % size] for t in range(tokens)], axis=2)


SLOW = "faulty: memory, delay=2ms,reorder=8ms,rate=3Gbit"


def make_transport(kind: str, incarnation: str):
    """`kind`: "memory" or "ucx", or one of them "faulty", with or without a fault."""
    kind, _, fault = kind.partition(", ")
    below = MemoryTransport(incarnation) if kind.endswith("memory") else UcxTransport(incarnation)
    return FaultyTransport(below, parse_fault(fault)) if kind.startswith("faulty") else below


async def until(condition, timeout_s: float = 5.0) -> None:
    """Lets the loop run until the condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def pair_over(
    sending, receiving, *, layout: KvLayout = LAYOUT, target_layout: KvLayout | None = None, blocks: int = 96, **options
) -> AsyncIterator[Pair]:
    """A sender and a receiver over two started transports (or one that talks to itself)."""
    source = Side(sending, Arena(layout, blocks), BlockPool(blocks))
    target_layout = target_layout or layout
    target = Side(receiving, Arena(target_layout, blocks), BlockPool(blocks))
    sender = Sender(sending, source.arena, incarnation=SENDER, **options)
    pair = Pair(source, target, sender, Receiver(receiving, target.arena))
    try:
        yield pair
    finally:
        await pair.receiver.aclose()
        await pair.sender.aclose()
        for task in pair.served:
            task.cancel()
        await asyncio.gather(*pair.served, return_exceptions=True)
        assert pair.sender.offers == 0
