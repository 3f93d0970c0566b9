"""A caller's context, a receiver of OTLP over gRPC, and span trees as text: what the trace tests need."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

Value = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Caller:
    """A caller's W3C context."""

    trace_id: str
    span_id: str
    traceparent: str


def caller(*, sampled: bool = True) -> Caller:
    """A new one."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return Caller(trace_id=trace_id, span_id=span_id, traceparent=f"00-{trace_id}-{span_id}-{sampled:02x}")


@dataclass(frozen=True, kw_only=True)
class SpanEvent:
    """Something that happened within a span, at nanoseconds since the epoch."""

    name: str
    at_ns: int
    attributes: dict[str, Value]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A received span. Ids are lower-case hex; times are nanoseconds since the epoch."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Value]
    events: tuple[SpanEvent, ...]


class Collector(TraceServiceServicer):
    """Collects what is exported to `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._spans: list[Span] = []
        self._changed = threading.Condition()

    def Export(  # noqa: N802 - the rpc's name
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        with self._changed:
            for of_resource in request.resource_spans:
                service = _values(of_resource.resource.attributes)["service.name"]
                for scope in of_resource.scope_spans:
                    self._spans += [_span(str(service), span) for span in scope.spans]
            self._changed.notify_all()
        return ExportTraceServiceResponse()

    def spans(self, trace_id: str | None = None) -> list[Span]:
        """What has come so far, in order of its beginning; of one trace, or everything."""
        with self._changed:
            chosen = [span for span in self._spans if trace_id in (None, span.trace_id)]
        return sorted(chosen, key=lambda span: span.begin_ns)

    def wait(self, trace_id: str | None, enough: Callable[[list[Span]], bool], *, limit_s: float = 20.0) -> list[Span]:
        """Waits until `enough` of these spans have come, and returns them; fails the test when they do not."""
        with self._changed:  # its lock may be taken again by the same thread
            there = self._changed.wait_for(lambda: enough(self.spans(trace_id)), limit_s)
        assert there, f"not the spans that were waited for:\n{tree(self.spans(trace_id))}"
        return self.spans(trace_id)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A running collector on a free port."""
    server = grpc.server(ThreadPoolExecutor(2))
    collector = Collector(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    add_TraceServiceServicer_to_server(collector, server)
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def tree(spans: list[Span]) -> str:
    """The spans as people read them: indented under their parents, with begin, length, service and attributes."""
    if not spans:
        return "(no spans)"
    begin_ns, known = min(span.begin_ns for span in spans), {span.span_id for span in spans}
    lines: list[str] = []

    def add(span: Span, depth: int) -> None:
        begin_ms, length_ms = (span.begin_ns - begin_ns) / 1e6, (span.end_ns - span.begin_ns) / 1e6
        attributes = " ".join(f"{name.removeprefix('diptych.')}={value}" for name, value in span.attributes.items())
        name = "  " * depth + span.name
        lines.append(f"{name:<24} {begin_ms:8.1f} ms + {length_ms:8.1f} ms  {span.service:<18} {attributes}")
        for child in spans:
            if child.parent_id == span.span_id:
                add(child, depth + 1)

    for span in spans:
        if span.parent_id not in known:
            add(span, 0)
    return "\n".join(lines)


def _span(service: str, span: trace_pb2.Span) -> Span:
    return Span(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        attributes=_values(span.attributes),
        events=tuple(
            SpanEvent(name=event.name, at_ns=event.time_unix_nano, attributes=_values(event.attributes))
            for event in span.events
        ),
    )


def _values(pairs: Iterator[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    return {
        "string_value": value.string_value,
        "int_value": value.int_value,
        "double_value": value.double_value,
        "bool_value": value.bool_value,
    }[kind or "string_value"]
