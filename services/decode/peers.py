"""The prefill workers that KV may come from: each is met once, before its first hand-off.

Life of a peer here: membership names a prefill worker with the same kind of KV → the two data planes connect and the
connection is probed, one peer at a time → what was found, or why nothing was, is a Link. This worker's own membership
tells it for as long as the peer lives. A link is measured once for each pair of incarnations; transfers do not depend
on it: they would connect by themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import grpc.aio
from diptych.v1 import kv_transfer_pb2 as pb
from diptych.v1 import kv_transfer_pb2_grpc, worker_pb2

from kvtransfer import Invitation, Measured, PeerLost, Receiver, TransferError, rdma_devices, shortfall
from services.cluster.background import start_loop, stop_loops
from services.cluster.membership import Link, MembershipView, WorkerRecord
from services.errors import DiptychError
from services.rpc.channels import Channels
from services.rpc.convert import to_ref
from services.rpc.errors import error_of

log = logging.getLogger(__name__)

JOIN_LIMIT_S = 15.0
_WAIT_S = 60.0
_REMEMBERED = 1024


class Meeting:
    """How this worker meets a peer. `cuda`: it is on a GPU."""

    def __init__(self, receiver: Receiver, channels: Channels, *, incarnation: str, cuda: bool) -> None:
        self._receiver, self._channels = receiver, channels
        self._incarnation, self._cuda = incarnation, cuda

    async def meet(self, peer: worker_pb2.WorkerRef) -> Link:
        """Connects, measures, compares. Never fails: a link without a measurement says why."""
        link = Link(peer=peer.name, peer_incarnation=peer.incarnation)
        try:
            invitation, measured = await self._probe(peer)
        except (TransferError, DiptychError) as error:
            log.warning("the link from %s could not be measured: %s", peer.name, error)
            return replace(link, error=str(error))
        warning = shortfall(measured.lanes, cuda=self._cuda, rdma_devices=rdma_devices())
        if warning:
            log.warning("KV FROM %s COMES SLOWLY: %s", peer.name, warning)
        log.info(
            "KV comes from %s over %s (%s): %.2f GB/s, round trip %.0f µs",
            *(peer.name, invitation.transport, measured.lanes),
            *(measured.bytes_per_s / 1e9, measured.round_trip_s * 1e6),
        )
        return replace(
            link,
            transport=invitation.transport,
            lanes=measured.lanes,
            bytes_per_s=measured.bytes_per_s,
            round_trip_s=measured.round_trip_s,
            warning=warning or "",
        )

    async def _probe(self, peer: worker_pb2.WorkerRef) -> tuple[Invitation, Measured]:
        request = pb.JoinRequest(sender=peer, receiver_incarnation=self._incarnation)
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channels.to(peer.address))
        call = stub.Join(request, timeout=JOIN_LIMIT_S)
        try:
            answer = await call.read()
            if not isinstance(answer, pb.JoinResponse):
                raise PeerLost(f"{peer.name} did not invite to the probe")
            invitation = Invitation(
                receiver=self._incarnation,
                data_address=answer.data_address,
                transport=answer.transport,
                tag_base=answer.tag_base,
            )
            measured = await self._receiver.probe(invitation, JOIN_LIMIT_S)
            await call.read()  # its end: the peer has found nothing wrong either
        except grpc.aio.AioRpcError as error:
            raise error_of(error, peer.name) from error
        finally:
            call.cancel()
        return invitation, measured


class Peers:
    """Meets every prefill worker that `view` names with this `fingerprint` of KV."""

    def __init__(self, view: MembershipView, meeting: Meeting, fingerprint: str) -> None:
        self._view, self._meeting, self._fingerprint = view, meeting, fingerprint
        self._links: OrderedDict[str, Link] = OrderedDict()  # by incarnation, also of peers that are gone for now
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins to watch and to meet, until `aclose`."""
        await self._view.start()
        self._loops = [start_loop(self._meet_all(), "peers")]

    async def aclose(self) -> None:
        """Stops; a probe that runs is given up."""
        await stop_loops(self._loops)
        await self._view.aclose()

    def links(self) -> Sequence[Link]:
        """Links from peers that live."""
        return [link for worker in self._peers() if (link := self._links.get(worker.incarnation))]

    def bytes_per_s(self, incarnation: str) -> float:
        """Measured bandwidth of the link from this peer; 0 when there is no measurement."""
        link = self._links.get(incarnation)
        return link.bytes_per_s if link else 0.0

    def _peers(self) -> list[WorkerRecord]:
        """Those that live; their order is that of their names."""
        records = [worker.record for worker in self._view.workers()]
        return [record for record in records if record.role == "prefill" and record.fingerprint == self._fingerprint]

    async def _meet_all(self) -> None:
        while True:
            for peer in self._peers():
                if peer.incarnation not in self._links:
                    ref = to_ref(name=peer.name, address=peer.address, incarnation=peer.incarnation)
                    self._links[peer.incarnation] = await self._meeting.meet(ref)
                    break  # the others may have changed meanwhile
            else:
                while len(self._links) > _REMEMBERED:
                    self._links.popitem(last=False)
                await self._view.changed(_WAIT_S)
