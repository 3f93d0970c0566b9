"""The receiving half of a hand-off over gRPC and the data plane: pulls one request's KV from its prefill worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import grpc.aio
from diptych.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, worker_pb2

from kvtransfer import Allowed, Control, KvLayout, Open, Received, Receiver, TransferError
from kvtransfer.compression import PLAIN_ONLY
from services.errors import DeadlineExceeded, HandOffLost, Unavailable
from services.rpc.channels import Channels
from services.rpc.convert import to_seconds
from services.rpc.errors import error_of
from services.telemetry import context as call_context
from services.worker.kv_control import CallingControl

log = logging.getLogger(__name__)

RENEW_S = 10.0
"""A request that waits for blocks renews its hand-off so often, or more often where the sender's lease is shorter."""

_RENEWALS_A_LEASE = 3
_RENEW_LEAST_S = 1.0
_RENEW_LIMIT_S = 2.0
_RELEASE_LIMIT_S = 2.0
_DRAIN_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HandOff:
    """Where a request's KV comes from. `deadline_s`: monotonic time at which both sides give up."""

    transfer_id: str
    sender: worker_pb2.WorkerRef
    deadline_s: float


class Puller:
    """Pulls hand-offs into this worker's arena."""

    def __init__(
        self,
        receiver: Receiver,
        channels: Channels,
        layout: KvLayout,
        incarnation: str,
        *,
        allowed_from: Callable[[str], Allowed] = lambda incarnation: PLAIN_ONLY,
        control_over: Callable[[Control], Control] = lambda control: control,
    ) -> None:
        """`allowed_from` says how a sender, named by its incarnation, may encode KV. `control_over` may put something
        between a pull and its control stream.
        """
        self._receiver, self._channels = receiver, channels
        self._layout, self._incarnation = layout, incarnation
        self._allowed_from = allowed_from
        self._control_over = control_over

    async def pull(
        self, hand_off: HandOff, blocks: tuple[int, ...], *, tokens: int, skip_tokens: int, limit_s: float
    ) -> Received:
        """Pulls KV of tokens [skip_tokens, tokens) into `blocks`, which begin at token 0. HandOffLost when it does not
        come.

        However it ends, nothing writes to the blocks afterwards.
        """
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channels.to(hand_off.sender.address))
        # The stream outlives the transfer's own limit, so that given-up pieces drain over it.
        call = stub.Pull(timeout=limit_s + _DRAIN_S, metadata=call_context.outgoing())  # type: ignore[call-arg]  # stubs differ
        control = self._control_over(CallingControl(call, hand_off.sender))
        opening = Open(
            transfer_id=hand_off.transfer_id,
            sender_incarnation=hand_off.sender.incarnation,
            receiver_incarnation=self._incarnation,
            layout=self._layout,
            skip_tokens=skip_tokens,
            allowed=self._allowed_from(hand_off.sender.incarnation),
        )
        try:
            return await self._receiver.pull(control, opening, block_ids=blocks, tokens=tokens, timeout_s=limit_s)
        except TransferError as error:
            raise _as_lost(error, hand_off) from error

    async def keep(self, hand_off: HandOff) -> NoReturn:
        """Renews the sender's lease, until it is cancelled: for a request that waits for blocks.

        HandOffLost: it is over at the sender, or as many renewals in a row as a lease has were not answered.
        """
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channels.to(hand_off.sender.address))
        request = kv_transfer_pb2.RenewRequest(transfer_id=hand_off.transfer_id, sender=hand_off.sender)
        wait_s, unanswered = RENEW_S, 0
        while True:
            await asyncio.sleep(wait_s)
            try:
                response = await stub.Renew(request, timeout=_RENEW_LIMIT_S)
            except grpc.aio.AioRpcError as error:
                unanswered += 1
                lost = error_of(error, hand_off.sender.name)
                if unanswered == _RENEWALS_A_LEASE or not isinstance(lost, Unavailable | DeadlineExceeded):
                    raise HandOffLost(f"hand-off {hand_off.transfer_id}: {lost}") from error
                log.info("renewal of %s: %s", hand_off.transfer_id, lost)
            else:
                unanswered = 0
                left_s = to_seconds(response.remaining) or RENEW_S * _RENEWALS_A_LEASE  # zero: not offered yet
                wait_s = min(RENEW_S, max(_RENEW_LEAST_S, left_s / _RENEWALS_A_LEASE))

    async def release(self, hand_off: HandOff) -> None:
        """Tells the sender that nobody will pull it. Its lease ends it anyway, so a failure is only logged."""
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channels.to(hand_off.sender.address))
        request = kv_transfer_pb2.ReleaseRequest(transfer_id=hand_off.transfer_id, sender=hand_off.sender)
        try:
            await stub.Release(request, timeout=_RELEASE_LIMIT_S)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
            log.info("release of %s at %s failed: %s", hand_off.transfer_id, hand_off.sender.name, reason)


def _as_lost(error: TransferError, hand_off: HandOff) -> HandOffLost:
    """As the gateway must see it: this worker is well, the one it wanted the KV from is not."""
    return HandOffLost(f"hand-off {hand_off.transfer_id} from {hand_off.sender.name}: {error}")
