"""Runs rows of the fault table with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from loadtest.fault_table import LIMIT_S, STOP_S, Kind, Row, Side

HOST: Final = "127.0.0.1"
FIRST, SECOND = "t-first", "t-second"
_START_S: Final = 40.0  # many at once, on few cores
_PHASE_S: Final = 10.0
_END_S: Final = 15.0
_ACTIONS: Final = {
    Kind.KILLED: "kill",
    Kind.RESTARTED: "kill",
    Kind.STOPPED: "stop",
    Kind.CUT: "cut",
    Kind.SILENT: "mute",
}

Values = dict[str, str | int | float]


class RowFailed(Exception):
    """What the row shows to be wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A row that was run. `pull` is what the receiver got, "" when it is dead; `error` is empty when all held.

    `settled_s`: from the fault (for a stopped victim: from its continuation) until nothing was held any more, by side.
    """

    row: Row
    pull: str = ""
    settled_s: dict[str, float] = field(default_factory=dict)
    duration_s: float = 0.0
    error: str = ""


class Peer:
    """A process of fault_peer, and what it said."""

    def __init__(self, process: asyncio.subprocess.Process, incarnation: str, host: str) -> None:
        self.process, self.incarnation = process, incarnation
        self.host, self.port = host, 0
        self._events: dict[str, asyncio.Queue[dict[str, object]]] = {}
        self.reading = asyncio.ensure_future(self._read())

    async def ready(self) -> None:
        """Waits until it can be told something."""
        port = (await self.heard("ready", _START_S))["port"]
        assert isinstance(port, int)
        self.port = port

    async def heard(self, event: str, limit_s: float) -> dict[str, object]:
        """The next event of that name. RowFailed: not in time."""
        queue = self._events.setdefault(event, asyncio.Queue())
        try:
            async with asyncio.timeout(limit_s):
                return await queue.get()
        except TimeoutError:
            failed = self._events.get("failed")
            why = f"; {failed.get_nowait()}" if failed and not failed.empty() else ""
            raise RowFailed(f"no {event!r} in {limit_s:.0f} s{why}") from None

    def tell(self, do: str, **values: str | float) -> None:
        """Gives a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, "with": values}).encode() + b"\n")

    async def settle(self, limit_s: float) -> None:
        """RowFailed: it still holds something at the limit."""
        self.tell("settle", limit_s=limit_s)
        if left := (await self.heard("settled", limit_s + _PHASE_S))["left"]:
            raise RowFailed(f"after {limit_s:.0f} s there are left: {left}")

    async def end(self) -> None:
        """Lets it close everything. RowFailed: it does not end by itself, or badly."""
        self.tell("end")
        try:
            async with asyncio.timeout(_END_S):
                status = await self.process.wait()
        except TimeoutError:
            raise RowFailed("a survivor does not end") from None
        if status != 0:
            raise RowFailed(f"a survivor ended with status {status}")

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if line.startswith(b'{"event"'):  # UCX logs to stdout
                said = json.loads(line)
                self._events.setdefault(said["event"], asyncio.Queue()).put_nowait(said)


@contextlib.asynccontextmanager
async def peer_process(options: Values, prefix: Sequence[str] = ()) -> AsyncIterator[Peer]:
    """A peer that starts, killed with the block. `prefix` goes before its command line."""
    incarnation = secrets.token_hex(8)
    merged = {"incarnation": incarnation, "host": HOST, "port": 0, "limit_s": LIMIT_S} | options
    process = await asyncio.create_subprocess_exec(
        *prefix,
        *(sys.executable, "-m", "loadtest.fault_peer", json.dumps(merged)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": os.environ.get("UCX_LOG_LEVEL", "fatal")},
    )
    peer = Peer(process, incarnation, str(merged["host"]))
    try:
        yield peer
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()
        await peer.reading


async def run_row(row: Row) -> Outcome:
    """Runs one row. Never raises for what the row shows."""
    begin_s = time.monotonic()
    run = _Run(row)
    try:
        await run.run()
        error = ""
    except RowFailed as failed:
        error = str(failed)
    return Outcome(row=row, pull=run.pull, settled_s=run.settled_s, duration_s=time.monotonic() - begin_s, error=error)


async def transfer(transfer_id: str, sender: Peer, receiver: Peer) -> None:
    """Starts one transfer: the offer is there, the pull begins."""
    seed = zlib.crc32(transfer_id.encode()) % 1000
    sender.tell("offer", transfer_id=transfer_id, receiver=receiver.incarnation, seed=seed, limit_s=LIMIT_S)
    await sender.heard("offered", _PHASE_S)
    receiver.tell(
        "pull",
        transfer_id=transfer_id,
        incarnation=sender.incarnation,
        host=sender.host,
        port=sender.port,
        seed=seed,
        limit_s=LIMIT_S,
    )


class _Run:
    """One row while it runs."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._peers: dict[Side, Peer] = {}
        self.pull = ""
        self.settled_s: dict[str, float] = {}

    async def run(self) -> None:
        row = self._row
        async with contextlib.AsyncExitStack() as stack:
            fault: Values = {"phase": row.phase.value, "action": _ACTIONS[row.kind]}
            for side in Side:
                options = fault if side is row.victim else {}
                self._peers[side] = await stack.enter_async_context(peer_process(options))
            for peer in self._peers.values():
                await peer.ready()
            await transfer(FIRST, self._peers[Side.SENDER], self._peers[Side.RECEIVER])
            await self._peers[row.victim].heard("phase", _PHASE_S)
            await self._settle_survivor(time.monotonic())
            self._judge_pull()
            if not row.victim_lives:
                port = self._peers[row.victim].port if row.kind is Kind.RESTARTED else 0
                self._peers[row.victim] = await stack.enter_async_context(peer_process({"port": port}))
                await self._peers[row.victim].ready()
            await self._whole_transfer()
            for peer in self._peers.values():
                await peer.end()

    async def _settle_survivor(self, fault_s: float) -> None:
        row = self._row
        sides = [row.survivor, row.victim] if row.victim_lives and row.kind is not Kind.STOPPED else [row.survivor]
        await asyncio.gather(*(self._settle(side, fault_s) for side in sides))
        if row.kind is Kind.STOPPED:
            await asyncio.sleep(max(0.0, fault_s + STOP_S - time.monotonic()))
            self._peers[row.victim].process.send_signal(signal.SIGCONT)
            await self._settle(row.victim, time.monotonic())

    async def _settle(self, side: Side, since_s: float) -> None:
        limit_s = self._row.deadline_s(side)
        peer = self._peers[side]
        if side is Side.RECEIVER:  # a pull that still runs holds nothing yet, perhaps
            self.pull = str((await peer.heard("pulled", since_s + limit_s - time.monotonic()))["outcome"])
        try:
            await peer.settle(max(0.0, since_s + limit_s - time.monotonic()))
        except RowFailed as failed:
            raise RowFailed(f"the {side.value}: {failed}") from None
        self.settled_s[side.value] = time.monotonic() - since_s

    def _judge_pull(self) -> None:
        if self.pull == "wrong":
            raise RowFailed("wrong KV was called good")
        if self.pull and not self._row.pull_may_be(good=self.pull == "good"):
            raise RowFailed(f"the pull cannot have been {self.pull!r}")

    async def _whole_transfer(self) -> None:
        await transfer(SECOND, self._peers[Side.SENDER], self._peers[Side.RECEIVER])
        outcome = (await self._peers[Side.RECEIVER].heard("pulled", _PHASE_S))["outcome"]
        if outcome != "good":
            raise RowFailed(f"the transfer afterwards was {outcome!r}")
        await asyncio.gather(*(peer.settle(LIMIT_S) for peer in self._peers.values()))
