"""`python -m loadtest soak`: tens of thousands of transfers between one pair of processes, and what they leave behind.

Two real processes, the workers' own gRPC service and UCX between them, 307 kB of KV in three pieces a transfer, four
transfers at a time. Flat means, after the first fifth of the run: no descriptor, socket or thread more at the end than
at the begin, and memory that grows by no more than RECEIVER_B bytes a transfer at the receiver and SENDER_B at the
sender, which remembers the ids that were used (65,536 of them, for ten minutes) so that none is used twice. Anything
left behind by each transfer would be more: a task or a future is kilobytes, a staging buffer is 128 KiB.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Final

import click
import psutil
from rich.table import Table

from kvtransfer import Arena, Receiver, UcxTransport
from loadtest.flatness import Growth, Sample, growth, take
from loadtest.kv_peer import BLOCKS, CONTENT, FIRST_TOKEN, LAYOUT, TOKENS, KvPeer, kv_peers
from services.cli.tables import table_console
from services.decode.hand_off import HandOff, Puller
from services.rpc.channels import Channels
from services.rpc.convert import to_ref

AT_A_TIME: Final = 4
SAMPLES: Final = 50
TOLD_EVERY: Final = 5
"""Samples."""

RECEIVER_B: Final = 200.0
SENDER_B: Final = 500.0
_LIMIT_S: Final = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Soaked:
    """What a run left behind."""

    transfers: int
    transfers_per_s: float
    receiver: Growth
    sender: Growth
    problems: tuple[str, ...]


@click.command()
@click.option("--transfers", default=30_000, show_default=True, type=click.IntRange(SAMPLES), help="How many.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
def soak(transfers: int, as_json: bool) -> None:
    """Many transfers between one pair; descriptors, sockets and memory must stay flat. Exit status 1 if they do not."""
    with kv_peers(1) as (peer,):
        soaked = asyncio.run(soak_pair(peer, transfers))
    if as_json:
        click.echo(json.dumps(asdict(soaked)))
    else:
        table_console().print(_table(soaked))
        click.echo("; ".join(soaked.problems) or "flat")
    if soaked.problems:
        raise SystemExit(1)


async def soak_pair(peer: KvPeer, transfers: int) -> Soaked:
    """Pulls that many transfers from the peer into this process. Raises what a transfer fails with."""
    incarnation = os.urandom(8).hex()
    transport, channels = UcxTransport(incarnation), Channels()
    await transport.start()
    arena = Arena(LAYOUT, BLOCKS * AT_A_TIME)
    receiver = Receiver(transport, arena)
    pulls = _Pulls(Puller(receiver, channels, LAYOUT, incarnation), arena, peer, transfers)
    begin_s = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for lane in range(AT_A_TIME):
                group.create_task(pulls.run(lane))
    finally:
        await receiver.aclose()
        await channels.aclose()
        await transport.aclose()
    ours, theirs = growth(pulls.ours), growth(pulls.theirs)
    problems = [f"receiver: {problem}" for problem in ours.problems(RECEIVER_B)]
    problems += [f"sender: {problem}" for problem in theirs.problems(SENDER_B)]
    took_s = time.monotonic() - begin_s
    return Soaked(
        transfers=transfers,
        transfers_per_s=transfers / took_s,
        receiver=ours,
        sender=theirs,
        problems=tuple(problems),
    )


class _Pulls:
    """Some lanes that pull t0, t1, t2, … between them, each into blocks of its own, and sample both processes."""

    def __init__(self, puller: Puller, arena: Arena, peer: KvPeer, transfers: int) -> None:
        self._puller, self._arena, self._peer, self._transfers = puller, arena, peer, transfers
        self._sender = to_ref(name=peer.name, address=peer.address, incarnation=peer.incarnation)
        self._next = self._done = 0
        self._us = psutil.Process()
        self.ours: list[Sample] = []
        self.theirs: list[Sample] = []

    async def run(self, lane: int) -> None:
        blocks = tuple(range(lane * BLOCKS, (lane + 1) * BLOCKS))
        whole = self._arena.array[:, :, blocks[0] : blocks[-1]]  # the last one is filled in part
        while self._next < self._transfers:
            hand_off = HandOff(
                transfer_id=f"t{self._next}", sender=self._sender, deadline_s=time.monotonic() + _LIMIT_S
            )
            self._next += 1
            whole[...] = 0
            got = await self._puller.pull(hand_off, blocks, tokens=TOKENS, skip_tokens=0, limit_s=_LIMIT_S)
            right = (got.first_token_id, got.bytes) == (FIRST_TOKEN, TOKENS * LAYOUT.token_bytes)
            if not right or not (whole == CONTENT).all():
                raise RuntimeError(f"{hand_off.transfer_id} brought {got}")
            self._done += 1
            if self._done % max(1, self._transfers // SAMPLES) == 0:
                self.ours.append(take(self._us, self._done))
                self.theirs.append(take(self._peer.process, self._done))
                if len(self.ours) % TOLD_EVERY == 0:
                    click.echo(f"{self._done:,} of {self._transfers:,}", err=True)


def _table(soaked: Soaked) -> Table:
    title = f"soak, {soaked.transfers:,} transfers, {soaked.transfers_per_s:.0f}/s"
    table = Table(title=title, title_justify="left")
    for column in (
        "more at the end",
        "descriptors",
        "sockets",
        "threads",
        "memory, B a transfer",
        "memory, MiB in all",
    ):
        table.add_column(column, justify="left" if column == "more at the end" else "right")
    for name, side in (("receiver", soaked.receiver), ("sender", soaked.sender)):
        counts = (str(count) for count in (side.descriptors, side.sockets, side.threads))
        table.add_row(name, *counts, f"{side.rss_bytes_per_transfer:.0f}", f"{side.rss_bytes / (1 << 20):.0f}")
    return table
