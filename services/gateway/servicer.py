"""The native gRPC door."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio
from diptych.v1 import gateway_pb2, gateway_pb2_grpc, request_pb2
from google.protobuf.duration_pb2 import Duration

from services.errors import InvalidArgument
from services.gateway import placement
from services.gateway.door import Gateway
from services.gateway.generate import Event
from services.gateway.request import (
    ChatPrompt,
    GenerationRequest,
    Message,
    Prompt,
    Sampling,
    Slo,
    TextPrompt,
    TokenPrompt,
)
from services.rpc.convert import to_duration, to_logprobs, to_seconds
from services.telemetry import context as call_context

GenerateContext = grpc.aio.ServicerContext[gateway_pb2.GenerateRequest, gateway_pb2.GenerateResponse]
ListContext = grpc.aio.ServicerContext[gateway_pb2.ListModelsRequest, gateway_pb2.ListModelsResponse]

_REASONS = {"stop": request_pb2.FINISH_REASON_STOP, "length": request_pb2.FINISH_REASON_LENGTH}


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Translates; the gateway does it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(  # noqa: N802 - the name in the proto; a stream is an async generator
        self, request: gateway_pb2.GenerateRequest, context: GenerateContext
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        """Streams the answers."""
        request_id = self._gateway.new_id()
        call_context.request_id.set(request_id)  # also for the line that is logged when the request fails
        wish = _request(request)
        limit_s = context.time_remaining()
        async with self._gateway.answering(wish, request_id=request_id, limit_s=limit_s) as events:
            first = True
            async for event in events:
                message = _response(event, wish.client_request_id)
                if first:
                    message.request_id, first = request_id, False
                yield message

    async def ListModels(  # noqa: N802 - the name in the proto
        self, request: gateway_pb2.ListModelsRequest, context: ListContext
    ) -> gateway_pb2.ListModelsResponse:
        """Lists the models of live workers."""
        models = [
            gateway_pb2.Model(name=model.name, context_tokens=model.context_tokens)
            for model in await self._gateway.models()
        ]
        return gateway_pb2.ListModelsResponse(models=models)


def _request(message: gateway_pb2.GenerateRequest) -> GenerationRequest:
    sampling = message.sampling
    return GenerationRequest(
        prompt=_prompt(message),
        model=message.model,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed if sampling.HasField("seed") else None,
            repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=dict(sampling.logit_bias),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        ),
        max_tokens=message.max_tokens,
        stop=tuple(message.stop),
        ignore_eos=message.ignore_eos,
        answers=message.answers or 1,
        tenant=message.tenant,
        priority=message.priority,
        deadline_s=_optional_seconds("deadline", message.deadline) if message.HasField("deadline") else None,
        slo=_slo(message.slo),
        client_request_id=message.client_request_id,
    )


def _slo(slo: request_pb2.Slo) -> Slo:
    first, later = "time_to_first_token", "time_per_token"
    return Slo(
        time_to_first_token_s=_optional_seconds(f"slo.{first}", slo.time_to_first_token)
        if slo.HasField("time_to_first_token")
        else None,
        time_per_token_s=_optional_seconds(f"slo.{later}", slo.time_per_token)
        if slo.HasField("time_per_token")
        else None,
    )


def _optional_seconds(field: str, duration: Duration) -> float:
    try:
        return to_seconds(duration)
    except ValueError as error:  # outside what a Duration may hold
        raise InvalidArgument(field, str(error)) from None


def _prompt(message: gateway_pb2.GenerateRequest) -> Prompt:
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(field="text", text=message.text)
        case "chat":
            turns = [Message(role=turn.role, content=turn.content) for turn in message.chat.messages]
            return ChatPrompt(field="chat.messages", messages=turns)
        case "token_ids":
            return TokenPrompt(field="token_ids", token_ids=tuple(message.token_ids.ids))
        case _:
            raise InvalidArgument("input", "one of text, chat and token_ids must be set")


def _response(event: Event, client_request_id: str) -> gateway_pb2.GenerateResponse:
    response = gateway_pb2.GenerateResponse(
        text=event.text,
        index=event.index,
        token_ids=event.token_ids,
        logprobs=map(to_logprobs, event.logprobs),
        prompt_logprobs=map(to_logprobs, event.prompt_logprobs),
    )
    if (finish := event.finish) is not None:
        usage = finish.usage
        response.finish.CopyFrom(
            gateway_pb2.Finish(
                reason=_REASONS[finish.reason],
                usage=request_pb2.Usage(
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    cached_tokens=usage.cached_tokens,
                ),
                phases=_phases(finish.phases),
                client_request_id=client_request_id,
            )
        )
    return response


def _phases(phases: placement.Phases) -> request_pb2.Phases:
    message = request_pb2.Phases(
        tokenize=_duration(phases.tokenize_s),
        queue=_duration(phases.queue_s),
        prefill_queue=_duration(phases.prefill_queue_s),
        prefill_compute=_duration(phases.prefill_compute_s),
        prefill_chunks=phases.prefill_chunks,
        first_token=_duration(phases.first_token_s),
        time_per_token=_duration(phases.time_per_token_s),
        total=_duration(phases.total_s),
        prefill_worker=phases.prefill_worker,
        decode_worker=phases.decode_worker,
        local_prefill_reason=phases.local_prefill_reason,
        placements=phases.placements,
    )
    if (transfer := phases.transfer) is not None:
        message.transfer.CopyFrom(
            request_pb2.TransferReport(
                bytes=transfer.bytes,
                pieces=transfer.pieces,
                transport=transfer.transport,
                duration=to_duration(transfer.duration_s),
                exposed=to_duration(transfer.exposed_s),
                gigabytes_per_second=transfer.gigabytes_per_second,
                encoding=transfer.encoding,
            )
        )
    if (turns := phases.turns) is not None:
        message.turns.CopyFrom(
            request_pb2.Turns(
                preemptions=turns.preemptions,
                recomputed=turns.recomputed,
                swapped_bytes=turns.swapped_bytes,
                waiting=to_duration(turns.waiting_s),
                lowest_level=turns.lowest_level,
            )
        )
    return message


def _duration(seconds: float | None) -> Duration | None:
    return None if seconds is None else to_duration(seconds)
