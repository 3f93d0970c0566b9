"""The one place where errors become gRPC statuses and statuses become errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NoReturn

import grpc
import grpc.aio

from services.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    DiptychError,
    HandOffLost,
    InvalidArgument,
    NotAdmitted,
    NotFound,
    Unavailable,
    WrongState,
)

FIELD_KEY = "diptych-field"
RETRY_AFTER_KEY = "retry-after-ms"

_BY_CODE: dict[grpc.StatusCode, type[DiptychError]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: WrongState,
    grpc.StatusCode.ABORTED: HandOffLost,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Status, message and trailing metadata for an error of ours (anything with a `code`), or INTERNAL for others."""
    if isinstance(error, TimeoutError):
        return grpc.StatusCode.DEADLINE_EXCEEDED, str(error) or "deadline exceeded", ()
    if isinstance(error, BaseExceptionGroup):  # a TaskGroup wraps even a single failure
        return status_of(error.exceptions[0])
    name: object = vars(type(error)).get("code") or next(
        (vars(base)["code"] for base in type(error).__mro__ if "code" in vars(base)), None
    )
    code = grpc.StatusCode[name] if isinstance(name, str) else grpc.StatusCode.INTERNAL
    trailing: list[tuple[str, str]] = []
    if isinstance(error, InvalidArgument):
        trailing.append((FIELD_KEY, error.field))
    if isinstance(error, NotAdmitted):
        trailing.append((RETRY_AFTER_KEY, str(int(error.retry_after_s * 1000))))
    message = str(error) if isinstance(name, str) else f"{type(error).__name__}: {error}"
    return code, message or type(error).__name__, tuple(trailing)


def error_of(failure: grpc.aio.AioRpcError, peer: str) -> DiptychError:
    """The error of ours that a failed call stands for; `peer` says in the message who answered."""
    code, details = failure.code(), failure.details() or ""
    metadata: Iterable[tuple[str, str | bytes]] = failure.trailing_metadata() or ()  # type: ignore[assignment]  # stubs differ
    trailing = dict(metadata)
    if code == grpc.StatusCode.INVALID_ARGUMENT:
        field = _text(trailing.get(FIELD_KEY, ""))
        return InvalidArgument(field, details.removeprefix(f"{field}: "))
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return NotAdmitted(details, retry_after_s=int(_text(trailing.get(RETRY_AFTER_KEY, "1000"))) / 1000)
    kind = _BY_CODE.get(code)
    if kind is None:
        return DiptychError(f"{peer}: {code.name}: {details}")
    return kind(f"{peer}: {details}")


async def abort_with(context: grpc.aio.ServicerContext, error: BaseException) -> NoReturn:  # type: ignore[type-arg]
    """Ends the call with the error's status. Cancellation is passed on untouched."""
    if isinstance(error, asyncio.CancelledError):
        raise error
    code, message, trailing = status_of(error)
    await context.abort(code, message, trailing)
    raise AssertionError("context.abort returns never")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
