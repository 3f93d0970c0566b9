"""Clients of the scheduler and the workers: plain values in and out, statuses become errors of ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import grpc
import grpc.aio
from diptych.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    request_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
)
from google.protobuf.duration_pb2 import Duration

from services.errors import DeadlineExceeded, DiptychError, Unavailable
from services.gateway import placement as p
from services.gateway.answer import FinishReason
from services.rpc.channels import Channels
from services.rpc.convert import from_logprobs, to_duration, to_seconds
from services.rpc.errors import error_of
from services.telemetry import context

SCHEDULER_AWAY_S = 5.0
_RETRY_S = 0.1
_HAND_OFF_SLACK_S = 2.0

_REASONS: dict[int, FinishReason | None] = {
    request_pb2.FINISH_REASON_UNSPECIFIED: None,
    request_pb2.FINISH_REASON_STOP: "stop",
    request_pb2.FINISH_REASON_LENGTH: "length",
}
_ROLES: dict[int, str] = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}


class SchedulerClient:
    """Calls the scheduler; survives its absence for `SCHEDULER_AWAY_S`."""

    def __init__(self, channels: Channels, address: str) -> None:
        self._channels, self._address = channels, address

    async def place(self, wish: p.PlaceWish, deadline_s: float) -> p.Placement:
        """Waits for a placement until `deadline_s` (monotonic). Raises the scheduler's errors, Unavailable without one.

        A scheduler that is away is asked again: Place is idempotent by (request, attempt).
        """
        request = _place_request(wish)
        away_since_s: float | None = None
        while True:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channels.to(self._address))
            try:
                left_s = _left(deadline_s)
                return _placement(await stub.Place(request, timeout=left_s, metadata=context.outgoing()))
            except grpc.aio.AioRpcError as failure:
                error = error_of(failure, "scheduler")
            if not isinstance(error, Unavailable):
                raise error
            now_s = time.monotonic()
            away_since_s = now_s if away_since_s is None else away_since_s
            # A connection that stands through it all says that the scheduler is there, and that this is its own answer.
            # One look is not enough: a connection breaks a moment after its calls, and one that broke may be back.
            stood = self._connected()
            await asyncio.sleep(min(_RETRY_S, _left(deadline_s)))
            if (stood and self._connected()) or now_s - away_since_s > SCHEDULER_AWAY_S:
                raise error

    def _connected(self) -> bool:
        return self._channels.to(self._address).get_state() == grpc.ChannelConnectivity.READY

    async def finish(self, request_id: str, timeout_s: float) -> None:
        """Says that the request is over. Raises DiptychError when that could not be said."""
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channels.to(self._address))
        request = scheduler_pb2.FinishRequest(request_id=request_id)
        try:
            await stub.Finish(request, timeout=timeout_s, metadata=context.outgoing())
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, "scheduler") from failure

    async def workers(self, timeout_s: float) -> list[p.LiveWorker]:
        """Live workers in the scheduler's view."""
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channels.to(self._address))
        try:
            response = await stub.ListWorkers(scheduler_pb2.ListWorkersRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, "scheduler") from failure
        return [
            p.LiveWorker(
                worker=_worker(view.ref),
                role=_ROLES.get(view.role, ""),
                ready=view.state == worker_pb2.WORKER_STATE_READY,
                model=view.model,
                context_tokens=view.context_tokens,
            )
            for view in response.workers
        ]


class WorkerClient:
    """Calls prefill and decode workers."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    async def prefill(self, work: p.LegWork, placement: p.Placement, deadline_s: float) -> p.PrefillAnswer:
        """The prefill leg. Cancelling it cancels the call. Raises LegFailed."""
        worker = placement.prefill
        if worker is None:
            raise ValueError("this placement has no prefill leg")
        request = prefill_pb2.PrefillRequest(
            sequence=_sequence(work),
            transfer_id=placement.transfer_id,
            worker=_ref(worker),
            hand_off_limit=to_duration(placement.hand_off_limit_s),
        )
        # The worker gives up after the hand-off limit; the slack lets it say so itself.
        timeout_s = min(_left(deadline_s), placement.hand_off_limit_s + _HAND_OFF_SLACK_S)
        stub = prefill_pb2_grpc.PrefillServiceStub(self._channels.to(worker.address))
        try:
            response = await stub.Prefill(request, timeout=timeout_s, metadata=context.outgoing())
        except grpc.aio.AioRpcError as failure:
            raise _leg_failed(failure, worker, placement, deadline_s) from failure
        return p.PrefillAnswer(
            token_id=response.token_id,
            reason=_REASONS.get(response.finish_reason),
            cached_tokens=response.cached_tokens,
            queue_s=to_seconds(response.queue),
            compute_s=to_seconds(response.compute),
            chunks=response.chunks,
            logprobs=from_logprobs(response.logprobs) if response.HasField("logprobs") else None,
            prompt_logprobs=tuple(map(from_logprobs, response.prompt_logprobs)),
        )

    async def decode(
        self, work: p.LegWork, placement: p.Placement, deadline_s: float
    ) -> AsyncGenerator[p.DecodeTokens, None]:
        """The decode leg, message by message. Closing or cancelling it cancels the call. Raises LegFailed."""
        worker = placement.decode
        request = decode_pb2.DecodeRequest(sequence=_sequence(work), worker=_ref(worker))
        if placement.prefill is not None:
            request.hand_off.CopyFrom(
                decode_pb2.HandOff(
                    transfer_id=placement.transfer_id,
                    sender=_ref(placement.prefill),
                    limit=to_duration(placement.hand_off_limit_s),
                )
            )
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels.to(worker.address))
        call = stub.Decode(request, timeout=_left(deadline_s), metadata=context.outgoing())
        try:
            async for message in call:
                yield _decode_tokens(message)
        except grpc.aio.AioRpcError as failure:
            raise _leg_failed(failure, worker, placement, deadline_s) from failure
        finally:
            call.cancel()

    async def release(self, placement: p.Placement, timeout_s: float) -> None:
        """Gives up a hand-off that is not being pulled. Raises DiptychError when that could not be said."""
        worker = placement.prefill
        if worker is None:
            return
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channels.to(worker.address))
        request = kv_transfer_pb2.ReleaseRequest(transfer_id=placement.transfer_id, sender=_ref(worker))
        try:
            await stub.Release(request, timeout=timeout_s, metadata=context.outgoing())
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, worker.name) from failure


def _left(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())


def _leg_failed(
    failure: grpc.aio.AioRpcError, worker: p.Worker, placement: p.Placement, deadline_s: float
) -> p.LegFailed:
    error: DiptychError = error_of(failure, worker.name)
    if error.code == "CANCELLED" or (isinstance(error, DeadlineExceeded) and time.monotonic() < deadline_s):
        # We did not cancel, and the request's own time is not over: the worker gave this leg up.
        error = Unavailable(str(error))
    return p.LegFailed(error, p.blame(error, worker, placement))


def _place_request(wish: p.PlaceWish) -> scheduler_pb2.PlaceRequest:
    return scheduler_pb2.PlaceRequest(
        request_id=wish.request_id,
        attempt=wish.attempt,
        model=wish.model,
        prompt_tokens=wish.prompt_tokens,
        max_new_tokens=wish.max_new_tokens,
        tenant=wish.tenant,
        priority=wish.priority,
        slo=request_pb2.Slo(
            time_to_first_token=_optional(wish.slo.time_to_first_token_s),
            time_per_token=_optional(wish.slo.time_per_token_s),
        ),
        avoid=[_ref(worker) for worker in wish.avoid],
        answers=wish.answers,
    )


def _placement(response: scheduler_pb2.PlaceResponse) -> p.Placement:
    return p.Placement(
        prefill=_worker(response.prefill) if response.HasField("prefill") else None,
        decode=_worker(response.decode),
        transfer_id=response.transfer_id,
        queue_s=to_seconds(response.queue),
        local_prefill_reason=response.local_prefill_reason,
        hand_off_limit_s=to_seconds(response.hand_off_limit),
    )


def _sequence(work: p.LegWork) -> request_pb2.Sequence:
    sampling = work.sampling
    return request_pb2.Sequence(
        request_id=work.request_id,
        token_ids=work.token_ids,
        sampling=request_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=sampling.logit_bias,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
        ),
        max_new_tokens=work.max_new_tokens,
        stop_token_ids=work.stop_token_ids,
        tenant=work.tenant,
        priority=work.priority,
        prompt_tokens=work.prompt_tokens,
    )


def _decode_tokens(message: decode_pb2.DecodeResponse) -> p.DecodeTokens:
    if message.finish_reason not in _REASONS and message.finish_reason != request_pb2.FINISH_REASON_UNSPECIFIED:
        raise DiptychError(f"decode ended for no known reason ({message.finish_reason})")
    return p.DecodeTokens(
        offset=message.offset,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(from_logprobs, message.logprobs)),
        begin=_decode_begin(message.begin) if message.HasField("begin") else None,
        reason=_REASONS.get(message.finish_reason),
        turns=_turns(message.turns) if message.HasField("turns") else None,
    )


def _turns(turns: request_pb2.Turns) -> p.Turns:
    return p.Turns(
        preemptions=turns.preemptions,
        recomputed=turns.recomputed,
        swapped_bytes=turns.swapped_bytes,
        waiting_s=to_seconds(turns.waiting),
        lowest_level=turns.lowest_level,
    )


def _decode_begin(begin: decode_pb2.DecodeBegin) -> p.DecodeBegin:
    return p.DecodeBegin(
        queue_s=to_seconds(begin.queue),
        transfer=_transfer(begin.transfer) if begin.HasField("transfer") else None,
        prefill_compute_s=to_seconds(begin.prefill_compute),
        prefill_chunks=begin.prefill_chunks,
        cached_tokens=begin.cached_tokens,
        prompt_logprobs=tuple(map(from_logprobs, begin.prompt_logprobs)),
    )


def _transfer(report: request_pb2.TransferReport) -> p.Transfer:
    return p.Transfer(
        bytes=report.bytes,
        pieces=report.pieces,
        transport=report.transport,
        duration_s=to_seconds(report.duration),
        exposed_s=to_seconds(report.exposed),
        gigabytes_per_second=report.gigabytes_per_second,
        encoding=report.encoding,
    )


def _optional(seconds: float | None) -> Duration | None:
    return None if seconds is None else to_duration(seconds)


def _ref(worker: p.Worker) -> worker_pb2.WorkerRef:
    return worker_pb2.WorkerRef(name=worker.name, address=worker.address, incarnation=worker.incarnation)


def _worker(ref: worker_pb2.WorkerRef) -> p.Worker:
    return p.Worker(name=ref.name, address=ref.address, incarnation=ref.incarnation)
