"""One process of a fault row: offers and pulls KV over UCX, is told what to do by lines of JSON on stdin, and says what
happened by lines on stdout.

`python -m loadtest.fault_peer OPTIONS`; OPTIONS is a JSON object: incarnation, host, port (0: a free one), fault, and
optionally the phase of its first transfer at which it says "phase" and, as action, the fault that it then inflicts on
itself: kill, stop, cut, mute, or none.
Commands: offer, pull, settle, end; see the methods of the same names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from kvtransfer import (
    Arena,
    BlockPool,
    Control,
    KvLayout,
    Message,
    Open,
    PeerLost,
    Receiver,
    Sender,
    TransferError,
    UcxTransport,
)
from kvtransfer.stream_control import StreamControl
from kvtransfer.transport.fault import parse_fault
from kvtransfer.transport.faulty import FaultyControl, FaultyTransport
from loadtest.fault_phases import PhasedControl
from loadtest.fault_table import Phase, Side

LAYOUT: Final = KvLayout(model="faults", dtype="bf16", layers=1, kv_heads=32, head_dim=256, block_tokens=16)
"""A piece of 128 tokens is 4 MB and takes some milliseconds: there is a middle to be killed in."""

TOKENS: Final = 512
BLOCKS: Final = TOKENS // LAYOUT.block_tokens
_SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_POLL_S: Final = 0.005
_CONNECT_S: Final = 2.0
_GONE_S: Final = 10.0
_ASKING_S: Final = 0.05
_OTHER_SEED: Final = 1_000

Options = dict[str, str | int | float]


class FaultPeer:
    """A worker's data plane without the worker. Its pool has room for one sequence: whoever comes next gets the same
    blocks.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._incarnation = str(options["incarnation"])
        below = UcxTransport(self._incarnation, host=str(options["host"]))
        self._transport = FaultyTransport(below, parse_fault(str(options.get("fault", ""))))
        self._arena, self._pool = Arena(LAYOUT, BLOCKS), BlockPool(BLOCKS)
        self._sender = Sender(self._transport, self._arena, incarnation=self._incarnation, checksums=True)
        self._receiver = Receiver(self._transport, self._arena)
        self._places = _mixed_places(self._arena.array.shape)
        self._reused: dict[str, int] = {}
        self._damaged = 0
        self._mute = False
        self._receiver_to_come = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Works until it is told to end."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await self._transport.start()
        host, port = str(self._options["host"]), int(self._options["port"])
        server = await asyncio.start_server(self._accept, host, port)
        _say("ready", port=server.sockets[0].getsockname()[1])
        while (line := await reader.readline()) and (told := json.loads(line))["do"] != "end":
            match told["do"]:
                case "offer":
                    self.offer(**told["with"])
                case "pull":
                    self._spawn(self.pull(**told["with"]))
                case "settle":
                    self._spawn(self.settle(**told["with"]))
        server.close()
        await self._receiver.aclose()
        await self._sender.aclose()
        await self._transport.aclose()
        for task in self._tasks:  # connections that a silent peer has left open
            task.cancel()

    def offer(self, transfer_id: str, receiver: str, seed: int, limit_s: float) -> None:
        """Offers a sequence whose KV follows from the seed. `receiver`: the incarnation that will pull it."""
        self._receiver_to_come = receiver
        blocks = self._pool.allocate(BLOCKS, transfer_id)
        self._write(blocks, seed)
        self._pool.lease(transfer_id)
        offer = self._sender.offer(transfer_id, TOKENS, blocks, limit_s, self._pool.free)
        offer.advance(TOKENS)
        offer.finish(seed)
        _say("offered")

    async def pull(self, transfer_id: str, incarnation: str, host: str, port: int, seed: int, limit_s: float) -> None:
        """Pulls a sequence, compares it, gives its blocks back, and after a failure writes something else to them at
        once. Says how it ended: "good", "wrong", or the error's name.
        """
        blocks = self._pool.allocate(BLOCKS, transfer_id)
        self._write(blocks, _OTHER_SEED)
        opening = Open(
            transfer_id=transfer_id,
            sender_incarnation=incarnation,
            receiver_incarnation=self._incarnation,
            layout=LAYOUT,
            skip_tokens=0,
        )
        begin_s = time.monotonic()
        try:
            async with asyncio.timeout(_CONNECT_S):
                control = StreamControl(*await asyncio.open_connection(host, port))
            received = await self._receiver.pull(
                self._phased(control, Side.RECEIVER), opening, block_ids=blocks, tokens=TOKENS, timeout_s=limit_s
            )
            right = received.first_token_id == seed and self._holds(blocks, seed)
            outcome = "good" if right else "wrong"
            self._pool.free(transfer_id)
        except (TransferError, OSError) as error:
            outcome = type(error).__name__
            self._pool.free(transfer_id)
            self._reused[transfer_id] = seed + _OTHER_SEED
            self._write(self._pool.allocate(BLOCKS, transfer_id), seed + _OTHER_SEED)
        _say("pulled", outcome=outcome, took_s=time.monotonic() - begin_s)

    async def settle(self, limit_s: float) -> None:
        """Waits until nothing is held any more, and says what is still held at the limit."""
        begin_s = time.monotonic()
        await self._wait_for_drain(begin_s + limit_s)
        for transfer_id, seed in self._reused.items():
            self._damaged += not self._holds(self._pool.blocks(transfer_id), seed)
            self._pool.free(transfer_id)
        self._reused.clear()
        self._pool.check()
        counts = self._pool.counts()
        left = {
            "offers": self._sender.offers,
            "blocks": counts.total - counts.free,
            "staging": self._sender.staging_out + self._receiver.staging_out,
            "quarantined": self._sender.quarantined + self._receiver.quarantined,
            "operations": self._transport.pending,
            "operations lost": self._transport.counters.operations_lost,
            "foreign bytes in reused blocks": self._damaged,
        }
        _say("settled", left={name: count for name, count in left.items() if count})

    async def _wait_for_drain(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            held = self._sender.staging_out + self._receiver.staging_out + self._sender.offers + self._transport.pending
            owners = set(self._pool.owners()) - set(self._reused)
            if not held and not owners:
                return
            await asyncio.sleep(_POLL_S)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._spawn(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        control = StreamControl(reader, writer)
        phased = self._phased(control, Side.SENDER)
        try:
            await self._sender.serve(phased, float(self._options["limit_s"]))
            await phased.close()
        except TransferError as error:
            if not self._mute:
                await control.fail(error)
        with contextlib.suppress(TimeoutError, OSError):  # the receiver ends the connection, or nobody does
            async with asyncio.timeout(_GONE_S):
                await reader.read()
        writer.close()

    def _phased(self, control: Control, side: Side) -> Control:
        """The first transfer's stream, with the fault that the options name."""
        if "phase" not in self._options:
            return control
        phase, action = Phase(self._options.pop("phase")), str(self._options["action"])
        faulty = FaultyControl(control, _loses_nothing)

        async def act() -> None:
            _say("phase")
            if action == "mute":
                self._mute = True
                faulty.mute()
            elif action == "cut":
                await self._cut(side)
            elif action in _SIGNALS:
                os.kill(os.getpid(), _SIGNALS[action])

        return PhasedControl(faulty, side, phase, act, before=action == "mute")

    async def _cut(self, side: Side) -> None:
        if side is Side.SENDER:  # a connection that the sender has not asked for yet is there, too
            with contextlib.suppress(PeerLost):
                await self._transport.endpoint_of(self._receiver_to_come, _ASKING_S)
        await self._transport.cut()

    def _write(self, blocks: tuple[int, ...], seed: int) -> None:
        self._arena.array[:, :, list(blocks)] = self._pattern(seed)

    def _holds(self, blocks: tuple[int, ...], seed: int) -> bool:
        return np.array_equal(self._arena.array[:, :, list(blocks)], self._pattern(seed))

    def _pattern(self, seed: int) -> npt.NDArray[np.uint16]:
        """KV of a whole sequence; each value depends on its place, and all differ between seeds."""
        return self._places ^ np.uint16(seed)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _say("failed", error=repr(error))


def _loses_nothing(_: Message) -> bool:
    return False


def _mixed_places(shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
    """A number for each place of an array, without a pattern."""
    places = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    return cast("npt.NDArray[np.uint16]", (places * np.uint32(2_654_435_761) >> 16).astype(np.uint16))


def _say(event: str, **values: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(FaultPeer(json.loads(sys.argv[1])).run())
