"""`python -m loadtest idle`: what peers cost that are connected and have nothing to do.

The measured process is this one, with a data plane, a gRPC channel and a probed link for each peer, as a decode worker
has them; the peers are processes of their own. Its CPU time over `--seconds` with all of them connected, less that with
none.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Final

import click
import psutil

from kvtransfer import Arena, Receiver, UcxTransport
from loadtest.kv_peer import LAYOUT, KvPeer, kv_peers
from services.cluster.record import Link
from services.decode.peers import Meeting
from services.rpc.channels import Channels
from services.rpc.convert import to_ref

MOST_PERCENT: Final = 1.0
_SETTLE_S: Final = 2.0


@click.command()
@click.option("--peers", default=32, show_default=True, type=click.IntRange(1), help="How many are connected.")
@click.option("--seconds", default=20.0, show_default=True, type=click.FloatRange(1), help="How long to look, twice.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def idle(peers: int, seconds: float, as_json: bool) -> None:
    """CPU of a process with idle peers against none. Exit status 1 when they cost more than 1 % of a core."""
    with kv_peers(peers) as running:
        alone, beside, links = asyncio.run(_compare(running, seconds))
    more = beside - alone
    if as_json:
        values = {"peers": peers, "seconds": seconds, "alone_percent": alone, "beside_percent": beside}
        click.echo(json.dumps({**values, "more_percent": more}))
    else:
        click.echo(f"{alone:.2f} % of a core alone, {beside:.2f} % beside {len(links)} idle peers: {more:+.2f} %")
    if more > MOST_PERCENT:
        raise SystemExit(1)


async def _compare(peers: list[KvPeer], seconds: float) -> tuple[float, float, list[Link]]:
    """Percent of a core without and with the peers, and the links to them."""
    incarnation = os.urandom(8).hex()
    transport, channels = UcxTransport(incarnation), Channels()
    await transport.start()
    receiver = Receiver(transport, Arena(LAYOUT, 1))
    meeting = Meeting(receiver, channels, incarnation=incarnation, cuda=False)
    alone = await _busy_percent(seconds)
    refs = [to_ref(name=peer.name, address=peer.address, incarnation=peer.incarnation) for peer in peers]
    links = [await meeting.meet(ref) for ref in refs]
    if failed := [link.error for link in links if link.error]:
        raise RuntimeError(f"{len(failed)} peers cannot be connected: {failed[0]}")
    beside = await _busy_percent(seconds)
    await receiver.aclose()
    await channels.aclose()
    await transport.aclose()
    return alone, beside, links


async def _busy_percent(seconds: float) -> float:
    await asyncio.sleep(_SETTLE_S)
    process = psutil.Process()
    before = process.cpu_times()
    await asyncio.sleep(seconds)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds * 100
