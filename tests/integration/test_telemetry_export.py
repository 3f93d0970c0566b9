"""Exporting spans when the collector does not answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from opentelemetry import trace

from services.telemetry import tracing

# A process, because a tracer provider is set once in its life.
PROGRAM = """
import sys, time
from services.telemetry import tracing
from services.telemetry.context import set_up_logging
set_up_logging("here", "info")
provider = tracing.set_up("here", "here-0", sys.argv[1])
with tracing.tracer().start_as_current_span("a"):
    pass
begin_s = time.monotonic()
provider.shutdown()
print(time.monotonic() - begin_s)
"""


def test_a_collector_that_does_not_answer_holds_no_process_up() -> None:
    """With the exporter's own limit of 10 s the supervisor killed workers that had drained in time.

    Not luck: the collector takes the connection and stays silent, so the whole of the limit is always waited for.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, f"http://127.0.0.1:{silent.getsockname()[1]}"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 6.0
    (line,) = done.stderr.splitlines()
    assert "ERROR" in line and "Failed to export traces" in line


def test_without_an_endpoint_there_is_no_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry's own variable names a collector: only ours may turn the export on."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    before = trace.get_tracer_provider()
    assert tracing.set_up("gateway", "gateway-1", "") is None
    assert trace.get_tracer_provider() is before
