"""The receiving side of `loadtest transfer`: one method for each thing that is measured, and the other process."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar, cast

import grpc.aio
import numpy as np
from diptych.v1 import kv_transfer_pb2_grpc, worker_pb2

from kvtransfer import Arena, KvLayout, Open, Received, Receiver, UcxTransport
from kvtransfer.device import Buffer
from kvtransfer.incoming import WINDOW
from kvtransfer.transport.base import Operation
from loadtest.transfer_peer import BLOCK_TOKENS, GRPC_METHOD, Line, Lines, pieces_of
from loadtest.transfer_rows import Sample
from services.rpc.options import CHANNEL_OPTIONS
from services.worker.kv_control import CallingControl

T = TypeVar("T")

LIMIT_S: Final = 120.0
_START_S: Final = 300.0
_END_S: Final = 20.0
_RAW_TAGS: Final = 1 << 62


class Peer:
    """The sending process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._lines = Lines(process.stdout, process.stdin.write)

    @staticmethod
    async def start(options: dict[str, object]) -> tuple[Peer, Line]:
        """Starts it, and waits for its first line. RuntimeError: it ended, or said nothing in time."""
        pipe = asyncio.subprocess.PIPE
        arguments = ("-m", "loadtest.transfer_child", json.dumps(options))
        peer = Peer(await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe))
        try:
            return peer, await peer.answer(_START_S)
        except BaseException:
            await peer.aclose()
            raise

    def ask(self, **line: str | int | float | bool | list[int]) -> None:
        """Asks for something; see transfer_child."""
        self._lines.say(dict(line))

    async def answer(self, limit_s: float = LIMIT_S) -> Line:
        """Its next line. RuntimeError: it ended, or said nothing in time."""
        line = await within(self._lines.hear(), limit_s)
        if line is None:
            raise RuntimeError("the sending process ended")
        return line

    async def aclose(self) -> None:
        """Ends it, hard if it must be."""
        if self._process.returncode is None:
            self.ask(do="end", link=0)
            try:
                await asyncio.wait_for(self._process.wait(), _END_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()


class Target:
    """What a decode worker's data plane is, and the raw loop over the same transport."""

    def __init__(self, transport: UcxTransport, incarnation: str, peer: Peer, hello: Line) -> None:
        self._transport, self._incarnation, self._peer = transport, incarnation, peer
        self._ports = cast("dict[str, int]", hello["ports"])
        self._incarnations = cast("dict[str, str]", json.loads(str(hello["incarnations"])))
        self._address = bytes.fromhex(str(hello["address"]))
        self._receivers: dict[str, tuple[Receiver, Arena]] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._memory: dict[int, list[Buffer]] = {}
        self._raw_tag = _RAW_TAGS

    def prepare(self, place: str, layout: KvLayout, tokens: int, more_blocks: int = 0) -> Arena:
        """Allocates where KV of a place goes: its first blocks."""
        arena = Arena(layout, -(-tokens // BLOCK_TOKENS) + more_blocks)
        arena.array[...] = 1
        self._receivers[place] = (Receiver(self._transport, arena), arena)
        return arena

    async def raw(self, place: str, tokens: int, link: float) -> Sample:
        """Tagged messages of the pieces' sizes into memory that was allocated before, as many posted as for a pull."""
        endpoint = await self._transport.connect(self._address, LIMIT_S)
        sizes = [piece.bytes for piece in pieces_of(place, tokens)]
        memory = self._raw_memory(max(sizes))
        tag, self._raw_tag = self._raw_tag, self._raw_tag + len(sizes)
        flying: list[Operation] = []
        begin_s = time.perf_counter()
        self._peer.ask(do="raw", link=link, receiver=self._incarnation, sizes=sizes, tag=tag)
        for index, size in enumerate(sizes):
            if len(flying) == WINDOW:
                await flying.pop(0).wait(LIMIT_S)
            flying.append(endpoint.receive(memory[index % WINDOW][:size], tag + index))
        for operation in flying:
            await operation.wait(LIMIT_S)
        return Sample(bytes=sum(sizes), duration_s=time.perf_counter() - begin_s)

    async def pull(self, place: str, tokens: int, link: float, pace: float = 0.0) -> Sample:
        """One transfer of ours, of KV that is there or (pace: bytes a second) becomes so; from the pull's first word to
        its acknowledgement.
        """
        transfer_id = secrets.token_hex(8)
        self._peer.ask(do="offer", place=place, link=link, transfer=transfer_id, tokens=tokens, pace=pace)
        begin_s = time.perf_counter()
        received = await self._pull(place, link, transfer_id, tokens)
        return Sample(bytes=received.bytes, duration_s=time.perf_counter() - begin_s)

    async def prefill(self, place: str, tokens: int, link: float, *, overlap: bool) -> Sample:
        """A prompt that the other process computes while we pull."""
        transfer_id = secrets.token_hex(8)
        self._peer.ask(do="compute", link=link, transfer=transfer_id, tokens=tokens, overlap=overlap)
        received = await self._pull(place, link, transfer_id, tokens)
        computed = await self._peer.answer()
        return Sample(
            bytes=received.bytes,
            duration_s=received.wire_s if overlap else received.exposed_s,
            exposed_s=received.exposed_s,
            compute_s=cast("float", computed["compute_s"]),
            paced=overlap,
        )

    async def grpc_bytes(self, place: str, tokens: int) -> Sample:
        """The same bytes in gRPC messages of the pieces' sizes."""
        sizes = [piece.bytes for piece in pieces_of(place, tokens)]
        get = self._channel(f"{place}/0").unary_stream(GRPC_METHOD, None, None)
        begin_s, count = time.perf_counter(), 0
        async for message in get(json.dumps(sizes).encode(), timeout=LIMIT_S):
            count += len(message)
        return Sample(bytes=count, duration_s=time.perf_counter() - begin_s)

    def memcpy(self, place: str, tokens: int) -> Sample:
        """The same bytes copied from memory to memory, in the pieces' sizes."""
        sizes = [piece.bytes for piece in pieces_of(place, tokens)]
        total = sum(sizes)
        source, target = np.ones(total, np.uint8), np.ones(total, np.uint8)
        begin_s, at = time.perf_counter(), 0
        for size in sizes:
            target[at : at + size] = source[at : at + size]
            at += size
        return Sample(bytes=total, duration_s=time.perf_counter() - begin_s)

    async def aclose(self) -> None:
        """Frees what this object made."""
        for receiver, _ in self._receivers.values():
            await receiver.aclose()
        for channel in self._channels.values():
            await channel.close(None)

    async def _pull(self, place: str, link: float, transfer_id: str, tokens: int) -> Received:
        door = f"{place}/{link:g}"
        receiver, arena = self._receivers[place]
        call = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel(door)).Pull(timeout=LIMIT_S)  # type: ignore[call-arg]  # stubs differ
        sender = worker_pb2.WorkerRef(name="sender", incarnation=self._incarnations[door])
        opening = Open(
            transfer_id=transfer_id,
            sender_incarnation=self._incarnations[door],
            receiver_incarnation=self._incarnation,
            layout=arena.layout,
            skip_tokens=0,
        )
        blocks = range(-(-tokens // BLOCK_TOKENS))
        control = CallingControl(call, sender)
        return await receiver.pull(control, opening, block_ids=blocks, tokens=tokens, timeout_s=LIMIT_S)

    def _raw_memory(self, size: int) -> list[Buffer]:
        if size not in self._memory:
            self._memory[size] = [np.ones(size, np.uint8) for _ in range(WINDOW)]
        return self._memory[size]

    def _channel(self, door: str) -> grpc.aio.Channel:
        if door not in self._channels:
            address = f"127.0.0.1:{self._ports[door]}"
            self._channels[door] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return self._channels[door]


async def within(work: Awaitable[T], limit_s: float) -> T:
    """Waits for it. RuntimeError: not in time."""
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError:
        raise RuntimeError(f"the sending process did not answer in {limit_s:.0f} s") from None


def link_bytes_per_s(link_gbps: float | None) -> float:
    """As the other process is told: 0 for a link as fast as it is."""
    return (link_gbps or 0.0) * 1e9 / 8


def cases_of(shapes: Sequence[str], tokens: Sequence[int]) -> list[tuple[str, int]]:
    """Every shape with every number of tokens."""
    return [(shape, count) for shape in shapes for count in tokens]
