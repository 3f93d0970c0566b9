"""The OpenAI HTTP door, and what machines ask: /health, /ready, /metrics.

A stream begins (status 200) with the first event of the answer, so whatever can be refused has its own status. An error
after that is a `data: {"error": …}` after which the stream ends, without `[DONE]` and without a finish reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Coroutine, Sequence

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.errors import Cancelled, DiptychError, InvalidArgument, NotAdmitted
from services.gateway.door import Gateway
from services.gateway.generate import Event
from services.gateway.metrics import CONTENT_TYPE
from services.gateway.openai_answers import Choice, Shape, error_body, status_code
from services.gateway.openai_fields import Body, ChatBody, CompletionBody, parse
from services.gateway.openai_logprobs import Json
from services.gateway.placement import Finish, Usage
from services.gateway.request import GenerationRequest
from services.rpc.options import MAX_MESSAGE_BYTES
from services.telemetry import context

log = logging.getLogger(__name__)

_ID_HEADER = b"x-request-id"
_BODY_LIMIT_S = 30.0
# FastAPI's own spans would stand between a caller and gateway.request, and be made for every probe of /ready.
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}


def application(gateway: Gateway) -> ASGIApp:
    """The ASGI application."""
    app = FastAPI(title="Diptych", docs_url=None, redoc_url=None, openapi_url=None, telemetry=_NO_TELEMETRY)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(DiptychError, _failed)
    app.add_exception_handler(Exception, _failed)  # answered, then raised again, for the log

    async def chat(request: Request) -> Response:
        body = parse(ChatBody, await _body(request))
        return Answering(gateway, body, body.to_request(), chat=True)

    async def completions(request: Request) -> Response:
        body = parse(CompletionBody, await _body(request))
        return Answering(gateway, body, body.to_request(), chat=False)

    async def models(request: Request) -> Response:
        data = [
            {"id": m.name, "object": "model", "created": 0, "owned_by": "diptych", "context_tokens": m.context_tokens}
            for m in await gateway.models()
        ]
        return JSONResponse({"object": "list", "data": data})

    async def health(request: Request) -> Response:
        return JSONResponse({"alive": True})

    async def ready(request: Request) -> Response:
        reason = await gateway.not_ready()
        return JSONResponse({"ready": not reason, "reason": reason}, status_code=503 if reason else 200)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(gateway.mesh.metrics.exposition(), media_type=CONTENT_TYPE)

    app.add_route("/v1/chat/completions", chat, methods=["POST"])
    app.add_route("/v1/completions", completions, methods=["POST"])
    for path, answer in (("/v1/models", models), ("/health", health), ("/ready", ready), ("/metrics", metrics)):
        app.add_route(path, answer, methods=["GET"])
    return _Edge(app, gateway)


class _Edge:
    """The outermost layer: request id and trace context for every request, errors as bodies."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app, self._gateway = app, gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["request_id"] = self._gateway.new_id()
        begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message["headers"], (_ID_HEADER, request_id.encode())]
            await send(message)

        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        with context.entered(headers):
            context.request_id.set(request_id)
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as error:  # noqa: BLE001 - the outermost edge of the request
                _log(scope["path"], error)
                if not begun:
                    await error_response(error)(scope, receive, send_with_id)


class Answering(Response):
    """The answers to one request, whole or as server-sent events. A client that goes away ends the request at once."""

    def __init__(self, gateway: Gateway, body: Body, request: GenerationRequest, *, chat: bool) -> None:
        super().__init__()
        self._gateway, self._body, self._request, self._chat = gateway, body, request, chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers on the connection."""
        shape = Shape(
            chat=self._chat,
            request_id=scope["request_id"],
            created=int(time.time()),
            model=self._gateway.mesh.model.name,
            logprobs=self._request.sampling.logprobs is not None,
            bytes_of=self._gateway.mesh.tokenizer.token_bytes,
        )
        answer = self._streamed if self._body.stream else self._whole
        if not await ended_before_disconnect(receive, answer(shape, scope, receive, send)):
            log.info("%s: the client went away", scope["path"])

    async def _whole(self, shape: Shape, scope: Scope, receive: Receive, send: Send) -> None:
        choices = [Choice(index=index) for index in range(self._request.answers)]
        finishes: list[Finish] = []
        async with self._gateway.answering(self._request, request_id=shape.request_id) as events:
            async for event in events:
                choices[event.index].add(event.text, event.shown)
                if event.finish is not None:
                    choices[event.index].reason = event.finish.reason
                    finishes.append(event.finish)
        if len(finishes) < len(choices):
            raise DiptychError("an answer ended without a finish")
        await JSONResponse(shape.body(choices, _usage(finishes)))(scope, receive, send)

    async def _streamed(self, shape: Shape, scope: Scope, receive: Receive, send: Send) -> None:
        begun: set[int] = set()
        finishes: list[Finish] = []
        async with self._gateway.answering(self._request, request_id=shape.request_id) as events:
            try:
                async for event in events:
                    if not begun:
                        await send(_stream_start())
                    data = self._chunks(shape, event, first=event.index not in begun)
                    begun.add(event.index)
                    if event.finish is not None:
                        finishes.append(event.finish)
                    if len(finishes) == self._request.answers:
                        data += self._end(shape, finishes)
                    if data:
                        await send(_part(data))
            except Exception as error:  # the status is gone; the stream's end must say what happened
                if not begun:
                    raise
                _log(scope["path"], error)
                await send(_part(_event(error_body(error))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _chunks(self, shape: Shape, event: Event, *, first: bool) -> bytes:
        wants_usage, finish = self._body.wants_usage, event.finish
        data = b""
        if event.text or event.shown or first:
            data += _event(shape.chunk(event.index, event.text, event.shown, first=first, wants_usage=wants_usage))
        if finish is not None:
            data += _event(shape.last_chunk(event.index, finish.reason, wants_usage=wants_usage))
        return data

    def _end(self, shape: Shape, finishes: Sequence[Finish]) -> bytes:
        usage = _event(shape.usage_chunk(_usage(finishes))) if self._body.wants_usage else b""
        return usage + b"data: [DONE]\n\n"


async def ended_before_disconnect(receive: Receive, work: Coroutine[None, None, None]) -> bool:
    """Runs `work`; the client's going away cancels it. The request's body must have been read.

    An error would be no use: nobody is there to be told.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait((working, watching))


def error_response(error: BaseException) -> Response:
    """An error as a response."""
    headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))} if isinstance(error, NotAdmitted) else {}
    return JSONResponse(error_body(error), status_code=status_code(error), headers=headers)


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_LIMIT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_MESSAGE_BYTES:
                    raise InvalidArgument("", f"the body is longer than {MAX_MESSAGE_BYTES} bytes")
    except ClientDisconnect:
        raise Cancelled("the client went away before its whole body had come") from None
    except TimeoutError:
        raise InvalidArgument("", f"the body did not arrive within {_BODY_LIMIT_S:g} s") from None
    return bytes(body)


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path}: {'no such path' if status == 404 else 'not allowed'}"
    details: Json = {"message": message, "type": "invalid_request_error", "param": None, "code": "unknown_url"}
    return JSONResponse({"error": details}, status_code=status)


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, DiptychError):
        _log(request.url.path, error)
    return error_response(error)


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _usage(finishes: Sequence[Finish]) -> Usage:
    return Usage.of_all(finish.usage for finish in finishes)


def _part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _stream_start() -> Message:
    # A fresh one each time: the layers outside add their headers to it.
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _log(path: str, error: BaseException) -> None:
    if status_code(error) == 500:
        log.error("%s failed", path, exc_info=error)
    else:
        log.info("%s: %s", path, error)
