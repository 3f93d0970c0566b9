"""What a call carries beside its message: the request id (for logs) and the W3C trace context, in gRPC metadata."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace

REQUEST_ID_KEY = "diptych-request-id"
request_id: ContextVar[str] = ContextVar("request_id", default="-")


def outgoing() -> tuple[tuple[str, str], ...]:
    """Metadata to send with a call made on behalf of the current request."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    if (current := request_id.get()) != "-":
        carrier[REQUEST_ID_KEY] = current
    return tuple(carrier.items())


@contextmanager
def entered(metadata: Iterable[tuple[str, str | bytes]] | Mapping[str, str] | None) -> Iterator[None]:
    """Makes the caller's request id and trace context current for the block."""
    pairs = metadata.items() if isinstance(metadata, Mapping) else metadata or ()
    carrier = {str(key).lower(): value for key, value in pairs if isinstance(value, str)}
    otel_token = otel_context.attach(propagate.extract(carrier))
    id_token = request_id.set(carrier.get(REQUEST_ID_KEY, request_id.get()))
    try:
        yield
    finally:
        # A stream that is closed by the garbage collector ends in another context than it began in.
        try:
            request_id.reset(id_token)
            otel_context.detach(otel_token)
        except ValueError:
            pass


class _RequestFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        span = trace.get_current_span().get_span_context()
        record.request_id = request_id.get()
        record.trace_id = f"{span.trace_id:032x}" if span.is_valid else "-"
        return True


def set_up_logging(service: str, level: str) -> None:
    """Log lines on stderr: time, level, service, request id, trace id, message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RequestFilter())
    line = f"%(asctime)s %(levelname)-7s {service} request=%(request_id)s trace=%(trace_id)s %(message)s"
    handler.setFormatter(logging.Formatter(line))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # It says that an export failed, once for each, and not for each of its tries.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
