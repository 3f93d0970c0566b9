"""The server interceptor: errors to statuses, request id and trace context from metadata into the call's context."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from services.rpc.errors import abort_with, status_of
from services.telemetry import context as call_context

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Message, Message]"
Unary = Callable[[Message, Context], Awaitable[Message]]
Stream = Callable[[Message | AsyncIterator[Message], Context], AsyncIterator[Message]]


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Wraps every handler of our services; health and reflection pass through the same way."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Message, Message]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Message, Message]:
        """Replaces the handler's behaviour with a wrapped one of the same kind."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            return handler
        method = handler_call_details.method.rsplit("/", 1)[-1]
        if handler.response_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            behaviour = cast(Stream, handler.stream_stream if handler.request_streaming else handler.unary_stream)
            return make(_stream(behaviour, method), handler.request_deserializer, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(
            _unary(cast(Unary, handler.unary_unary), method),
            handler.request_deserializer,
            handler.response_serializer,
        )


def _unary(behaviour: Unary, method: str) -> Unary:
    async def call(request: Message, context: Context) -> Message:
        with call_context.entered(context.invocation_metadata()):
            try:
                return await behaviour(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - the outermost edge of the call
                _log(method, error)
                await abort_with(context, error)

    return call


def _stream(behaviour: Stream, method: str) -> Stream:
    async def call(request: Message | AsyncIterator[Message], context: Context) -> AsyncIterator[Message]:
        with call_context.entered(context.invocation_metadata()):
            messages = behaviour(request, context)
            try:
                async for message in messages:
                    yield message
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - the outermost edge of the call
                _log(method, error)
                await abort_with(context, error)
            finally:
                await messages.aclose()  # type: ignore[attr-defined]  # an async generator; frees what it holds now

    return call


def _log(method: str, error: BaseException) -> None:
    code, message, _ = status_of(error)
    if code == grpc.StatusCode.INTERNAL:
        log.error("%s failed: %s", method, message, exc_info=error)
    elif not isinstance(error, asyncio.CancelledError):
        log.info("%s: %s: %s", method, code.name, message)
