"""OpenTelemetry tracing: off unless an OTLP endpoint is configured; the caller's sampling flag is honoured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

# A process that ends sends its last spans first: a collector that is away may hold it up for so long.
EXPORT_LIMIT_S = 2

Attributes = Mapping[str, str | int | float | bool]


def set_up(service: str, name: str, endpoint: str) -> TracerProvider | None:
    """Exports this process's spans to `endpoint` (OTLP over gRPC); empty means off, and spans cost next to nothing."""
    if not endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    resource = Resource.create({"service.name": f"diptych-{service}", "service.instance.id": name})
    provider = TracerProvider(resource=resource, sampler=ParentBased(ALWAYS_ON))
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"), timeout=EXPORT_LIMIT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    trace.set_tracer_provider(provider)
    return provider


def tracer() -> trace.Tracer:
    """The tracer all spans of the product come from."""
    return trace.get_tracer("diptych")


class Event(NamedTuple):
    """Something that happened within a phase, at a monotonic time of this process."""

    name: str
    at_s: float
    attributes: Attributes


def record(
    name: str, begin_s: float, end_s: float, attributes: Attributes | None = None, events: Sequence[Event] = ()
) -> None:
    """Records a phase that is over, given in monotonic seconds of this process, under the current span.

    Step threads know no spans: they note when things happened, and the event loop records it afterwards.
    """
    if end_s < begin_s:
        raise ValueError(f"span {name} ends before it begins")
    offset_ns = time.time_ns() - time.monotonic_ns()
    span = tracer().start_span(name, start_time=int(begin_s * 1e9) + offset_ns, attributes=attributes)
    for event in events:
        span.add_event(event.name, event.attributes, timestamp=int(event.at_s * 1e9) + offset_ns)
    span.end(int(end_s * 1e9) + offset_ns)
