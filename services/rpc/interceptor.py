"""The server interceptor: errors to statuses, request id and trace context from metadata into the call's context."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from services.errors import InvalidArgument
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
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.request_streaming:
            stream = _stream(cast(Stream, handler.stream_stream), method)
            return grpc.stream_stream_rpc_method_handler(stream, read, write)
        # One request is parsed in the wrapper: grpc calls a message that is none UNKNOWN and logs a traceback for it.
        if handler.response_streaming:
            stream = _stream(cast(Stream, handler.unary_stream), method, _parser(read))
            return grpc.unary_stream_rpc_method_handler(stream, None, write)
        unary = _unary(cast(Unary, handler.unary_unary), method, _parser(read))
        return grpc.unary_unary_rpc_method_handler(unary, None, write)


def _parser(read: Callable[[bytes], Message] | None) -> Callable[[object], Message]:
    def parse(request: object) -> Message:
        if read is None or not isinstance(request, bytes):
            raise TypeError(f"a request must come as bytes, not {type(request).__name__}")
        try:
            return read(request)
        except DecodeError as error:
            raise InvalidArgument("", f"the message cannot be read: {error}") from None

    return parse


def _unary(behaviour: Unary, method: str, parse: Callable[[object], Message]) -> Unary:
    async def call(request: Message, context: Context) -> Message:
        with call_context.entered(context.invocation_metadata()):
            try:
                return await behaviour(parse(request), context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - the outermost edge of the call
                _log(method, error)
                await abort_with(context, error)

    return call


def _stream(behaviour: Stream, method: str, parse: Callable[[object], Message] | None = None) -> Stream:
    async def call(request: Message | AsyncIterator[Message], context: Context) -> AsyncIterator[Message]:
        with call_context.entered(context.invocation_metadata()):
            messages: AsyncIterator[Message] | None = None
            try:
                messages = behaviour(parse(request) if parse else request, context)
                async for message in messages:
                    yield message
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - the outermost edge of the call
                _log(method, error)
                await abort_with(context, error)
            finally:
                if messages is not None:
                    await messages.aclose()  # type: ignore[attr-defined]  # an async generator; frees what it holds now

    return call


def _log(method: str, error: BaseException) -> None:
    code, message, _ = status_of(error)
    if code == grpc.StatusCode.INTERNAL:
        log.error("%s failed: %s", method, message, exc_info=error)
    elif not isinstance(error, asyncio.CancelledError):
        log.info("%s: %s: %s", method, code.name, message)
