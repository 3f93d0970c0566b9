"""Whom a decode worker meets, and what it tells of it."""

from __future__ import annotations

import asyncio
from typing import cast

from diptych.v1 import worker_pb2

from services.cluster.membership import BlockCounts, Link, LiveWorker, MembershipView, Role, WorkerRecord
from services.decode.peers import Meeting, Peers


def worker(name: str, *, role: Role = "prefill", incarnation: str = "", fingerprint: str = "f") -> LiveWorker:
    record = WorkerRecord(
        name=name,
        address=f"{name}:1",
        incarnation=incarnation or name,
        role=role,
        state="ready",
        model="m",
        fingerprint=fingerprint,
        context_tokens=1,
        block_tokens=1,
        blocks=BlockCounts(),
    )
    return LiveWorker(record=record, heartbeat_age_s=0.0)


class FakeView:
    """A view that is told who lives."""

    def __init__(self) -> None:
        self.live: list[LiveWorker] = []
        self._news = asyncio.Event()

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    def workers(self) -> list[LiveWorker]:
        return self.live

    async def changed(self, timeout_s: float) -> bool:
        self._news.clear()
        await self._news.wait()
        return True

    async def become(self, *live: LiveWorker) -> None:
        """Says who lives now, and lets everybody look."""
        self.live = list(live)
        self._news.set()
        for _ in range(20):
            await asyncio.sleep(0)


class FakeMeeting:
    """Notes whom it meets."""

    def __init__(self) -> None:
        self.met: list[str] = []

    async def meet(self, peer: worker_pb2.WorkerRef) -> Link:
        self.met.append(peer.incarnation)
        await asyncio.sleep(0)
        return Link(peer=peer.name, peer_incarnation=peer.incarnation)


async def started() -> tuple[Peers, FakeView, FakeMeeting]:
    view, meeting = FakeView(), FakeMeeting()
    peers = Peers(cast(MembershipView, view), cast(Meeting, meeting), "f")
    await peers.start()
    await view.become()
    return peers, view, meeting


async def test_prefill_workers_with_the_same_kv_are_met_and_nobody_else() -> None:
    peers, view, meeting = await started()
    strangers = (worker("decode-0", role="decode"), worker("prefill-9", fingerprint="another model"))
    await view.become(*strangers, worker("prefill-0"), worker("prefill-1"))
    assert meeting.met == ["prefill-0", "prefill-1"]
    assert [link.peer for link in peers.links()] == ["prefill-0", "prefill-1"]
    await peers.aclose()


async def test_a_peer_is_met_once_and_one_that_came_back_is_another() -> None:
    peers, view, meeting = await started()
    for live in ([worker("p", incarnation="1")], [], [worker("p", incarnation="1")], [worker("p", incarnation="2")]):
        await view.become(*live)
    assert meeting.met == ["1", "2"]
    assert [link.peer_incarnation for link in peers.links()] == ["2"]
    await peers.aclose()


async def test_links_from_peers_that_are_gone_are_not_told() -> None:
    peers, view, _ = await started()
    await view.become(worker("prefill-0"))
    assert peers.links()
    await view.become()
    assert not peers.links()
    await peers.aclose()
