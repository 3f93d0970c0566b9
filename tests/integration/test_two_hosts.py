"""Two hosts: each side in a network namespace of its own, joined by a cable whose rate is limited and which is cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from loadtest.fault_peer import LAYOUT, TOKENS
from loadtest.fault_run import Peer, peer_process, transfer
from loadtest.fault_table import LIMIT_S, Kind, Phase, Row, Side

BYTES = TOKENS * LAYOUT.token_bytes
LEFT, RIGHT = "10.231.47.1", "10.231.47.2"
SILENCE_S = Row(victim=Side.SENDER, kind=Kind.SILENT, phase=Phase.MID_PIECE).deadline_s(Side.SENDER)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=10)


def reason_to_skip() -> str:
    """Why there can be no namespaces here; empty when there can."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found"
    probe = f"dp-probe-{os.getpid()}"
    try:
        run("ip", "netns", "add", probe)
        run("ip", "netns", "exec", probe, "true")
    except subprocess.CalledProcessError as refused:
        return f"no network namespaces: {refused.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return ""


@dataclass(frozen=True, kw_only=True)
class Cable:
    """Two namespaces and what joins them; each end is called after its namespace."""

    left: str
    right: str

    def limit(self, rate: str) -> None:
        """Limits the rate in both directions."""
        for end in (self.left, self.right):
            shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
            run("ip", "netns", "exec", end, "tc", "qdisc", "replace", "dev", end, *shape)

    def set(self, state: str) -> None:
        """ "down" cuts it: nobody is told. "up" joins it again."""
        run("ip", "-n", self.left, "link", "set", self.left, state)


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    made = Cable(left=f"dp{os.getpid()}l", right=f"dp{os.getpid()}r")
    try:
        for end in (made.left, made.right):
            run("ip", "netns", "add", end)
            run("ip", "-n", end, "link", "set", "lo", "up")
        peer = ("peer", "name", made.right, "netns", made.right)
        run("ip", "link", "add", made.left, "netns", made.left, "type", "veth", *peer)
        for end, address in ((made.left, LEFT), (made.right, RIGHT)):
            run("ip", "-n", end, "addr", "add", f"{address}/24", "dev", end)
            run("ip", "-n", end, "link", "set", end, "up")
        yield made
    finally:
        for end in (made.left, made.right):
            subprocess.run(["ip", "netns", "del", end], capture_output=True, check=False)


@contextlib.asynccontextmanager
async def hosts(cable: Cable, **fault: str) -> AsyncIterator[tuple[Peer, Peer]]:
    """A sender on the left and a receiver on the right; the sender says when it is at the phase that `fault` names."""
    async with (
        peer_process({"host": LEFT, **fault}, prefix=("ip", "netns", "exec", cable.left)) as sender,
        peer_process({"host": RIGHT}, prefix=("ip", "netns", "exec", cable.right)) as receiver,
    ):
        for peer in (sender, receiver):
            await peer.ready()
        yield sender, receiver
        for peer in (sender, receiver):
            await peer.end()


async def took_s(sender: Peer, receiver: Peer, transfer_id: str) -> float:
    """Moves a whole sequence and returns how long that took."""
    await transfer(transfer_id, sender, receiver)
    pulled = await receiver.heard("pulled", LIMIT_S + 1)
    assert pulled["outcome"] == "good"
    assert isinstance(pulled["took_s"], float)
    return pulled["took_s"]


@pytest.mark.slow
async def test_kv_crosses_a_cable_no_faster_than_it_is_and_a_cut_cable_is_given_up(cable: Cable) -> None:
    """The cut is silent, as a pulled plug is: nothing but the deadlines tells either side. Afterwards the same two
    processes, joined again, move KV.
    """
    async with hosts(cable, phase=Phase.MID_PIECE.value, action="none") as (sender, receiver):
        cable.limit("100mbit")
        await transfer("cut", sender, receiver)
        await sender.heard("phase", LIMIT_S)
        cable.set("down")
        cut_s = time.monotonic()
        pulled = await receiver.heard("pulled", LIMIT_S + 2)
        assert pulled["outcome"] not in ("good", "wrong")
        for peer in (sender, receiver):
            await peer.settle(cut_s + SILENCE_S - time.monotonic())
        cable.set("up")
        for rate, bits_per_s in (("100mbit", 100e6), ("1gbit", 1e9)):
            cable.limit(rate)
            duration_s = await took_s(sender, receiver, rate)
            assert duration_s > 0.9 * BYTES * 8 / bits_per_s, "the cable is faster than its rate"
            for peer in (sender, receiver):
                await peer.settle(LIMIT_S)
