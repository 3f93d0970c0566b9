"""The gRPC face of a prefill worker: translates, checks who is meant, calls the shell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc.aio
from diptych.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from kvtransfer.sender import Sender
from services.engine.card import ModelCard
from services.prefill.messages import FirstToken, Submit
from services.prefill.service import LEASE_S, PrefillService
from services.rpc.convert import to_duration, to_logprobs
from services.rpc.server import RpcServer
from services.telemetry import spans, tracing
from services.worker.convert import from_limit, from_sampling, require_sequence, to_finish
from services.worker.identity import Identity
from services.worker.kv_control import ServingControl

PrefillContext: TypeAlias = "grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]"
PullContext: TypeAlias = "grpc.aio.ServicerContext[kv_transfer_pb2.PullRequest, kv_transfer_pb2.PullResponse]"
ReleaseContext: TypeAlias = "grpc.aio.ServicerContext[kv_transfer_pb2.ReleaseRequest, kv_transfer_pb2.ReleaseResponse]"

RenewContext: TypeAlias = "grpc.aio.ServicerContext[kv_transfer_pb2.RenewRequest, kv_transfer_pb2.RenewResponse]"
JoinContext: TypeAlias = "grpc.aio.ServicerContext[kv_transfer_pb2.JoinRequest, kv_transfer_pb2.JoinResponse]"

PULL_LIMIT_S = 600.0
"""For a Pull without a deadline; ours always have one."""

JOIN_LIMIT_S = 15.0
"""For a Join without a deadline; ours always have one."""


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """PrefillService."""

    NAME = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name

    def __init__(self, service: PrefillService, identity: Identity, card: ModelCard) -> None:
        self._service, self._identity, self._card = service, identity, card

    def register(self, server: RpcServer) -> None:
        """Adds itself to a server."""
        server.add(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, self)

    async def Prefill(  # noqa: N802 - the proto's name
        self, request: prefill_pb2.PrefillRequest, context: PrefillContext
    ) -> prefill_pb2.PrefillResponse:
        """See prefill.proto."""
        self._identity.require_work(request.worker)
        sequence = request.sequence
        require_sequence(sequence, self._card.vocab, self._card.context_tokens)
        submit = Submit(
            key=request.transfer_id,
            token_ids=tuple(sequence.token_ids),
            sampling=from_sampling(sequence.sampling),
            max_new_tokens=sequence.max_new_tokens,
            stop_token_ids=frozenset(sequence.stop_token_ids),
            prompt_tokens=sequence.prompt_tokens,
            tenant=sequence.tenant,
            priority=sequence.priority,
        )
        first = await self._service.prefill(submit, from_limit(request.hand_off_limit))
        _record(first, len(submit.token_ids))
        return prefill_pb2.PrefillResponse(
            token_id=first.token_id,
            finish_reason=to_finish(first.finish),
            cached_tokens=first.cached_tokens,
            queue=to_duration(first.admitted_s - first.submitted_s),
            compute=to_duration(first.computed_s - first.admitted_s),
            chunks=first.chunks,
            logprobs=to_logprobs(first.logprobs) if first.logprobs else None,
            prompt_logprobs=map(to_logprobs, first.prompt_logprobs),
        )


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """KvTransferService over kvtransfer's sender."""

    NAME = kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name

    def __init__(self, sender: Sender, identity: Identity) -> None:
        self._sender, self._identity = sender, identity

    def register(self, server: RpcServer) -> None:
        """Adds itself to a server."""
        server.add(kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server, self)

    async def Pull(  # noqa: N802
        self, request_iterator: AsyncIterator[kv_transfer_pb2.PullRequest], context: PullContext
    ) -> AsyncIterator[kv_transfer_pb2.PullResponse]:
        """See kv_transfer.proto. The sender outlives a broken stream by as long as its pieces need to drain."""
        control = ServingControl(request_iterator)
        left_s = context.time_remaining()
        serving = asyncio.create_task(self._serve(control, PULL_LIMIT_S if left_s is None else left_s), name="pull")
        try:
            async for response in control.outgoing():
                yield response
            await serving
        finally:
            serving.cancel()

    async def Release(  # noqa: N802
        self, request: kv_transfer_pb2.ReleaseRequest, context: ReleaseContext
    ) -> kv_transfer_pb2.ReleaseResponse:
        """See kv_transfer.proto."""
        self._identity.require(request.sender)
        self._sender.release(request.transfer_id)
        return kv_transfer_pb2.ReleaseResponse()

    async def Renew(  # noqa: N802
        self, request: kv_transfer_pb2.RenewRequest, context: RenewContext
    ) -> kv_transfer_pb2.RenewResponse:
        """See kv_transfer.proto."""
        self._identity.require(request.sender)
        left_s = self._sender.renew(request.transfer_id, LEASE_S)
        return kv_transfer_pb2.RenewResponse(remaining=to_duration(left_s))

    async def Join(  # noqa: N802
        self, request: kv_transfer_pb2.JoinRequest, context: JoinContext
    ) -> AsyncIterator[kv_transfer_pb2.JoinResponse]:
        """See kv_transfer.proto."""
        self._identity.require(request.sender)
        invitation = self._sender.invite(request.receiver_incarnation)
        yield kv_transfer_pb2.JoinResponse(
            data_address=invitation.data_address, transport=invitation.transport, tag_base=invitation.tag_base
        )
        left_s = context.time_remaining()
        await self._sender.answer(invitation, JOIN_LIMIT_S if left_s is None else left_s)

    async def _serve(self, control: ServingControl, limit_s: float) -> None:
        try:
            await self._sender.serve(control, limit_s)
        finally:
            await control.close()


def _record(first: FirstToken, tokens: int) -> None:
    tracing.record(spans.PREFILL_QUEUE, first.submitted_s, first.admitted_s)
    attributes = {
        "diptych.prompt_tokens": tokens,
        "diptych.chunks": first.chunks,
        "diptych.cached_tokens": first.cached_tokens,
    }
    tracing.record(spans.PREFILL_COMPUTE, first.admitted_s, first.computed_s, attributes)
