"""The gRPC face of a decode worker: translates, checks who is meant, calls the shell, records the spans."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

import grpc.aio
from diptych.v1 import decode_pb2, decode_pb2_grpc, request_pb2

from kvtransfer import Received as Arrived
from services.decode.hand_off import HandOff
from services.decode.messages import Began, Finished, Submit, Tokens, Turns
from services.decode.service import DecodeService, Stream
from services.engine.card import ModelCard
from services.errors import DiptychError
from services.rpc.convert import to_duration, to_logprobs
from services.rpc.server import RpcServer
from services.schedule.policy import Change
from services.telemetry import spans, tracing
from services.worker.convert import from_limit, from_sampling, require_sequence, to_finish
from services.worker.identity import Identity

DecodeContext: TypeAlias = "grpc.aio.ServicerContext[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]"


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """DecodeService."""

    NAME = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name

    def __init__(self, service: DecodeService, identity: Identity, card: ModelCard) -> None:
        self._service, self._identity, self._card = service, identity, card

    def register(self, server: RpcServer) -> None:
        """Adds itself to a server."""
        server.add(decode_pb2_grpc.add_DecodeServiceServicer_to_server, self)

    async def Decode(  # noqa: N802 - the proto's name
        self, request: decode_pb2.DecodeRequest, context: DecodeContext
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        """See decode.proto."""
        self._identity.require_work(request.worker)
        submit = self._submission(request, context.time_remaining())
        stream = self._service.open(submit, _hand_off(request))
        recorded = _Recorded(stream)
        try:
            async for events in self._service.events(stream):
                recorded.note(events)
                yield _response(events, stream)
        except DiptychError:
            recorded.end("failed", time.monotonic())
            raise
        finally:
            recorded.end("cancelled", time.monotonic())
            self._service.close(submit.key)

    def _submission(self, request: decode_pb2.DecodeRequest, left_s: float | None) -> Submit:
        sequence = request.sequence
        require_sequence(sequence, self._card.vocab, self._card.context_tokens)
        return Submit(
            key=self._service.new_key(sequence.request_id),
            token_ids=tuple(sequence.token_ids),
            sampling=from_sampling(sequence.sampling),
            max_new_tokens=sequence.max_new_tokens,
            stop_token_ids=frozenset(sequence.stop_token_ids),
            local=not request.HasField("hand_off"),
            prompt_tokens=sequence.prompt_tokens,
            tenant=sequence.tenant,
            priority=sequence.priority,
            deadline_s=None if left_s is None else time.monotonic() + left_s,
        )


def _hand_off(request: decode_pb2.DecodeRequest) -> HandOff | None:
    if not request.HasField("hand_off"):
        return None
    hand_off = request.hand_off
    deadline_s = time.monotonic() + from_limit(hand_off.limit)
    return HandOff(transfer_id=hand_off.transfer_id, sender=hand_off.sender, deadline_s=deadline_s)


def _response(events: Sequence[Began | Tokens | Finished], stream: Stream) -> decode_pb2.DecodeResponse:
    """One message for everything that is ready."""
    tokens = [event for event in events if isinstance(event, Tokens)]
    response = decode_pb2.DecodeResponse(
        offset=tokens[0].offset if tokens else 0,
        token_ids=[token for event in tokens for token in event.token_ids],
        logprobs=[to_logprobs(logprobs) for event in tokens for logprobs in event.logprobs],
    )
    for event in events:
        if isinstance(event, Began):
            response.begin.CopyFrom(_begin(event, stream.arrived))
        elif isinstance(event, Finished):
            response.finish_reason = to_finish(event.reason)
            response.turns.CopyFrom(_turns(event.turns))
    return response


def _turns(turns: Turns) -> request_pb2.Turns:
    return request_pb2.Turns(
        preemptions=turns.preemptions,
        recomputed=turns.recomputed,
        swapped_bytes=turns.swapped_bytes,
        waiting=to_duration(turns.waited_s),
        lowest_level=turns.lowest_level,
    )


def _begin(event: Began, arrived: Arrived | None) -> decode_pb2.DecodeBegin:
    begin = decode_pb2.DecodeBegin(
        queue=to_duration(event.admitted_s - event.submitted_s), cached_tokens=event.cached_tokens
    )
    if arrived:
        begin.transfer.CopyFrom(to_report(arrived))
    else:
        begin.prefill_compute.CopyFrom(to_duration(event.ready_s - event.admitted_s))
        begin.prefill_chunks = event.chunks
        begin.prompt_logprobs.extend(map(to_logprobs, event.prompt_logprobs))
    return begin


def to_report(arrived: Arrived) -> request_pb2.TransferReport:
    """The hand-off as the client's phases show it."""
    return request_pb2.TransferReport(
        bytes=arrived.bytes,
        pieces=arrived.pieces,
        transport=arrived.transport,
        duration=to_duration(arrived.duration_s),
        exposed=to_duration(arrived.exposed_s),
        gigabytes_per_second=arrived.gigabytes_per_second,
        encoding=arrived.encoding,
    )


class _Recorded:
    """The spans of one request, recorded as its events come. Times are monotonic seconds of this process."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._ready_s: float | None = None  # since when it decodes

    def note(self, events: Sequence[Began | Tokens | Finished]) -> None:
        """Records what these events say."""
        for event in events:
            if isinstance(event, Began):
                self._ready_s = event.ready_s
                self._begin(event)
            elif isinstance(event, Finished):
                self.end(event.reason, event.ended_s, event.turns)

    def end(self, reason: str, ended_s: float, turns: Turns | None = None) -> None:
        """Records the decoding, once and only if there was any. A call that is cancelled gets no `Finished`."""
        if self._ready_s is not None:
            attributes: dict[str, str | int | float] = {"diptych.finish_reason": reason}
            events: list[tracing.Event] = []
            if turns is not None:
                attributes["diptych.recomputed"] = turns.recomputed
                attributes["diptych.preemptions"] = turns.preemptions
                attributes["diptych.swapped_bytes"] = turns.swapped_bytes
                attributes["diptych.waited_s"] = turns.waited_s
                attributes["diptych.lowest_level"] = turns.lowest_level
                events = [_span_event(change) for change in turns.changes]
            tracing.record(spans.DECODE_RUN, self._ready_s, max(self._ready_s, ended_s), attributes, events)
        self._ready_s = None

    def _begin(self, event: Began) -> None:
        tracing.record(spans.DECODE_QUEUE, event.submitted_s, event.admitted_s)
        attributes: tracing.Attributes
        if arrived := self._stream.arrived:
            attributes = {
                "diptych.bytes": arrived.bytes,
                "diptych.pieces": arrived.pieces,
                "diptych.transport": arrived.transport,
                "diptych.encoding": arrived.encoding,
                "diptych.gigabytes_per_second": arrived.gigabytes_per_second,
                "diptych.exposed_s": arrived.exposed_s,
            }
            tracing.record(spans.KV_TRANSFER, event.ready_s - arrived.duration_s, event.ready_s, attributes)
        else:
            attributes = {
                "diptych.prompt_tokens": self._stream.prompt_tokens,
                "diptych.chunks": event.chunks,
                "diptych.cached_tokens": event.cached_tokens,
            }
            tracing.record(spans.PREFILL_COMPUTE, event.admitted_s, event.ready_s, attributes)


def _span_event(change: Change) -> tracing.Event:
    attributes: dict[str, str | int] = {"diptych.level": change.level}
    if change.detail:
        attributes["diptych.detail"] = change.detail
    return tracing.Event(name=change.what, at_s=change.at_s, attributes=attributes)
