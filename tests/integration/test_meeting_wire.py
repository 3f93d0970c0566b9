"""What workers say to each other beside a pull, over real gRPC: meeting for the first time, and renewing a hand-off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from diptych.v1 import worker_pb2

from kvtransfer import Arena, KvLayout, MemoryTransport, Receiver, Sender
from services.decode import hand_off as hand_off_module
from services.decode import peers as peers_module
from services.decode.hand_off import HandOff, Puller
from services.decode.peers import Meeting
from services.errors import HandOffLost
from services.prefill import servicer as servicer_module
from services.prefill.servicer import KvTransferServicer
from services.rpc.channels import Channels
from services.rpc.convert import to_ref
from services.rpc.server import RpcServer
from services.worker.identity import Identity

LAYOUT = KvLayout(model="m", dtype="bf16", layers=2, kv_heads=1, head_dim=8, block_tokens=16)
OWN = "d" * 16


@dataclass
class Pair:
    """A prefill worker's service and a decode worker's callers, in one process."""

    sender: Sender
    identity: Identity
    server: RpcServer
    meeting: Meeting
    puller: Puller
    receiver: Receiver

    @property
    def ref(self) -> worker_pb2.WorkerRef:
        return to_ref(name="prefill-0", address=self.identity.address, incarnation=self.identity.incarnation)

    def hand_off(self) -> HandOff:
        return HandOff(transfer_id="t", sender=self.ref, deadline_s=0.0)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    server = RpcServer("127.0.0.1", 0, [KvTransferServicer.NAME])
    identity = Identity("prefill-0", f"127.0.0.1:{server.bind()}")
    sending, receiving = MemoryTransport(identity.incarnation), MemoryTransport(OWN)
    await sending.start()
    await receiving.start()
    sender = Sender(sending, Arena(LAYOUT, 4), incarnation=identity.incarnation)
    receiver, channels = Receiver(receiving, Arena(LAYOUT, 4)), Channels()
    KvTransferServicer(sender, identity).register(server)
    await server.start()
    yield Pair(
        sender=sender,
        identity=identity,
        server=server,
        meeting=Meeting(receiver, channels, incarnation=OWN, cuda=False),
        puller=Puller(receiver, channels, LAYOUT, OWN),
        receiver=receiver,
    )
    await channels.aclose()
    await server.stop(0)
    await receiver.aclose()
    await sender.aclose()
    await receiving.aclose()
    await sending.aclose()


async def test_two_workers_that_meet_know_what_their_link_can_do(pair: Pair) -> None:
    link = await pair.meeting.meet(pair.ref)
    assert (link.peer, link.peer_incarnation) == ("prefill-0", pair.identity.incarnation)
    assert (link.error, link.transport, link.lanes) == ("", "memory", "memory")
    assert link.bytes_per_s > 1e7
    assert 0 < link.round_trip_s < 1
    await pair.receiver.drained()
    assert pair.receiver.staging_out == 0


async def test_a_peer_of_another_incarnation_is_not_met(pair: Pair) -> None:
    ref = to_ref(name="prefill-0", address=pair.identity.address, incarnation="f" * 16)
    link = await pair.meeting.meet(ref)
    assert "incarnation" in link.error
    assert (link.bytes_per_s, link.lanes) == (0.0, "")


async def test_a_peer_that_is_gone_or_does_not_answer_is_a_link_that_failed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "JOIN_LIMIT_S", 0.2)
    await pair.sender._answering.acquire()  # busy with another probe
    assert (await pair.meeting.meet(pair.ref)).error
    pair.sender._answering.release()
    await pair.server.stop(0)
    link = await pair.meeting.meet(pair.ref)
    assert link.error and not link.bytes_per_s


async def test_a_link_slower_than_the_machine_allows_is_warned_of(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers_module, "shortfall", lambda lanes, *, cuda, rdma_devices: f"too slow: {lanes}")
    link = await pair.meeting.meet(pair.ref)
    assert link.warning == "too slow: memory"
    assert any(record.levelname == "WARNING" and "too slow" in record.getMessage() for record in caplog.records)


async def test_a_waiting_request_keeps_its_hand_off_over_the_wire(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_off_module, "RENEW_S", 0.05)
    monkeypatch.setattr(servicer_module, "LEASE_S", 0.4)
    released: asyncio.Queue[str] = asyncio.Queue()
    pair.sender.offer("t", 16, (0,), 60.0, released.put_nowait, lease_s=0.4)
    keeping = asyncio.create_task(pair.puller.keep(pair.hand_off()))
    done, _ = await asyncio.wait([keeping], timeout=1.2)
    assert not done and released.empty(), "three leases have passed"
    keeping.cancel()
    assert await asyncio.wait_for(released.get(), 5) == "t"


async def test_renewals_before_the_offer_go_on_and_those_after_its_end_say_so(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_off_module, "RENEW_S", 0.02)
    keeping = asyncio.create_task(pair.puller.keep(pair.hand_off()))
    done, _ = await asyncio.wait([keeping], timeout=0.2)
    assert not done
    pair.sender.release("t")
    with pytest.raises(HandOffLost, match="released"):
        await asyncio.wait_for(keeping, 5)


async def test_a_sender_that_answers_no_renewal_of_a_lease_is_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_off_module, "RENEW_S", 0.05)
    await pair.server.stop(0)
    with pytest.raises(HandOffLost, match="prefill-0"):
        await asyncio.wait_for(pair.puller.keep(pair.hand_off()), 15)
