"""One request is one trace over all four services, under the caller's own span; `-s` prints the trees."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx
import pytest
from asking import ask, request, workers
from diptych.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2
from meshes import Mesh, start
from traces import Collector, Span, caller, collecting, tree

PROMPT_TOKENS, NEW_TOKENS = 40, 6
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # of the tiny model: layers × {K, V} × heads × numbers × bytes
# Every span of a request whose prompt is computed by a prefill worker, and the service it must come from.
SERVICES = {
    "gateway.request": "diptych-gateway",
    "gateway.tokenize": "diptych-gateway",
    "scheduler.place": "diptych-scheduler",
    "prefill.queue": "diptych-prefill",
    "prefill.compute": "diptych-prefill",
    "decode.queue": "diptych-decode",
    "kv.transfer": "diptych-decode",
    "decode.run": "diptych-decode",
}


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A mesh that exports its spans, and where they and its log lines go."""

    mesh: Mesh
    collector: Collector
    log: Path

    def log_lines(self, word: str, *, limit_s: float = 10.0) -> list[str]:
        """Waits until the log has lines with `word`, and returns them."""
        deadline_s = time.monotonic() + limit_s
        while not (found := [line for line in self.log.read_text().splitlines() if word in line]):
            assert time.monotonic() < deadline_s, f"no log line has {word!r}"
            time.sleep(0.05)
        return found


@contextmanager
def stderr_into(path: Path) -> Iterator[None]:
    """Children that are started in the block write their stderr there, for good."""
    ours = os.dup(2)
    try:
        with path.open("w") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


@pytest.fixture(scope="module")
def traced(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    log = tmp_path_factory.mktemp("traced") / "log"
    with collecting() as collector:
        with stderr_into(log):
            mesh = start(tiny_llama, extra=[f"--otlp={collector.endpoint}"])
        yield Traced(mesh=mesh, collector=collector, log=log)
        mesh.stop()


def whole(spans: list[Span]) -> bool:
    return set(SERVICES) <= {span.name for span in spans}


async def send(mesh: Mesh, door: str, traceparent: str, first: int = 10) -> str:
    """One request through a door of the gateway, whose prompt begins with the token `first`; returns its id."""
    prompt = list(range(first, first + PROMPT_TOKENS))
    if door == "grpc":
        asked = request(prompt, max_tokens=NEW_TOKENS, ignore_eos=True)
        return (await ask(mesh, asked, metadata=[("traceparent", traceparent)])).request_id
    body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=30) as client:
        reply = await client.post(f"{mesh.http}/v1/completions", json=body, headers={"traceparent": traceparent})
    assert reply.status_code == 200, reply.text
    return reply.headers["x-request-id"]


@pytest.mark.slow
@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_a_request_is_one_trace_over_four_services_under_the_callers_span(traced: Traced, door: str) -> None:
    by = caller()
    request_id = await send(traced.mesh, door, by.traceparent)
    spans = traced.collector.wait(by.trace_id, whole)
    print(f"\n{door}\n{tree(spans)}")
    assert {span.name: span.service for span in spans} == SERVICES
    assert len(spans) == len(SERVICES)
    of = {span.name: span for span in spans}
    root = of["gateway.request"]
    assert root.parent_id == by.span_id
    assert {span.parent_id for span in spans if span is not root} == {root.span_id}
    assert not any(span.failed for span in spans)
    assert all(root.begin_ns <= span.begin_ns <= span.end_ns for span in spans)
    assert root.attributes["diptych.request_id"] == request_id
    assert root.attributes["diptych.prompt_tokens"] == PROMPT_TOKENS
    assert root.attributes["diptych.completion_tokens"] == NEW_TOKENS
    assert root.attributes["diptych.finish_reason"] == "length"


@pytest.mark.slow
async def test_spans_say_what_was_computed_and_moved_and_by_whom(traced: Traced) -> None:
    by = caller()
    await send(traced.mesh, "grpc", by.traceparent, first=100)
    of = {span.name: span.attributes for span in traced.collector.wait(by.trace_id, whole)}
    place, transfer = of["scheduler.place"], of["kv.transfer"]
    assert (place["diptych.prefill_worker"], place["diptych.decode_worker"]) == ("prefill-0", "decode-0")
    assert place["diptych.queue_s"] >= 0
    compute = of["prefill.compute"]
    assert (compute["diptych.prompt_tokens"], compute["diptych.chunks"]) == (PROMPT_TOKENS, 1)
    assert compute["diptych.cached_tokens"] == 0
    assert transfer["diptych.bytes"] == PROMPT_TOKENS * TOKEN_BYTES
    assert transfer["diptych.pieces"] >= 1
    assert transfer["diptych.transport"] == "ucx"
    assert transfer["diptych.gigabytes_per_second"] > 0
    assert transfer["diptych.exposed_s"] >= 0
    assert of["decode.run"]["diptych.finish_reason"] == "length"
    assert of["decode.run"]["diptych.recomputed"] == 0
    assert all(name.startswith("diptych.") for attributes in of.values() for name in attributes)


@pytest.mark.slow
async def test_spans_say_what_was_cached(traced: Traced) -> None:
    for cached in (0, 32):
        by = caller()
        await send(traced.mesh, "grpc", by.traceparent, first=200)
        of = {span.name: span.attributes for span in traced.collector.wait(by.trace_id, whole)}
        assert of["prefill.compute"]["diptych.cached_tokens"] == cached
        assert of["kv.transfer"]["diptych.bytes"] == (PROMPT_TOKENS - cached) * TOKEN_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_a_caller_that_does_not_sample_gets_no_spans(traced: Traced, door: str) -> None:
    silent, after = caller(sampled=False), caller()
    await send(traced.mesh, door, silent.traceparent)
    await send(traced.mesh, door, after.traceparent)
    # Every process exports in order: with the later request's spans here, the earlier one's would be too.
    traced.collector.wait(after.trace_id, whole)
    assert traced.collector.spans(silent.trace_id) == []


@pytest.mark.slow
async def test_probes_and_lists_make_no_spans(traced: Traced) -> None:
    """The HTTP framework made a span of its own for every probe, and one above each request."""
    async with httpx.AsyncClient(timeout=30, base_url=traced.mesh.http) as client:
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            assert (await client.get(path)).status_code == 200
    after = caller()
    await send(traced.mesh, "http", after.traceparent)
    traced.collector.wait(after.trace_id, whole)
    assert {span.name for span in traced.collector.spans()} <= set(SERVICES)


@pytest.mark.slow
async def test_without_a_callers_context_a_request_begins_a_trace_of_its_own(traced: Traced) -> None:
    answer = await ask(traced.mesh, request([5, 6, 7], max_tokens=3, ignore_eos=True))

    def mine(spans: list[Span]) -> list[Span]:
        return [span for span in spans if span.attributes.get("diptych.request_id") == answer.request_id]

    (root,) = mine(traced.collector.wait(None, lambda spans: bool(mine(spans))))
    assert root.parent_id == ""
    traced.collector.wait(root.trace_id, whole)


@pytest.mark.slow
async def test_decoding_that_a_stop_string_ends_has_its_span(traced: Traced) -> None:
    """The gateway ends such a call by a cancel, after which no `Finished` comes: its decode.run was not recorded."""
    prompt = [5, 6, 7, 8]
    free = await ask(traced.mesh, request(prompt, max_tokens=12, ignore_eos=True))
    by = caller()
    asked = request(prompt, max_tokens=1500, ignore_eos=True, stop=[free.text[5:8]])
    await ask(traced.mesh, asked, metadata=[("traceparent", by.traceparent)])
    of = {span.name: span for span in traced.collector.wait(by.trace_id, whole)}
    assert of["gateway.request"].attributes["diptych.finish_reason"] == "stop"
    assert of["decode.run"].attributes["diptych.finish_reason"] == "cancelled"
    assert not of["decode.run"].failed


@pytest.mark.slow
async def test_log_lines_of_a_request_carry_its_id_and_its_trace(traced: Traced) -> None:
    by = caller()
    request_id = await send(traced.mesh, "grpc", by.traceparent)
    (line,) = traced.log_lines(f"request={request_id}")
    assert f"gateway request={request_id} trace={by.trace_id} length after" in line


@pytest.mark.slow
async def test_a_refused_request_can_be_found_in_the_log_and_among_the_spans(traced: Traced) -> None:
    """Errors of the native door were logged after the request's id was forgotten, as `request=-`."""
    by = caller()
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(traced.mesh, request([999_999], max_tokens=1), metadata=[("traceparent", by.traceparent)])
    (root,) = traced.collector.wait(by.trace_id, bool)
    assert (root.name, root.failed) == ("gateway.request", True)
    request_id = root.attributes["diptych.request_id"]
    (line,) = traced.log_lines(by.trace_id)
    assert f"request={request_id} " in line and "INVALID_ARGUMENT" in line


@pytest.mark.slow
async def test_log_lines_of_a_worker_carry_the_ids_of_its_caller(traced: Traced) -> None:
    by = caller()
    (prefill,) = (view for view in await workers(traced.mesh) if view.role == worker_pb2.ROLE_PREFILL)
    stale = worker_pb2.WorkerRef(name=prefill.ref.name, address=prefill.ref.address, incarnation="0" * 16)
    async with grpc.aio.insecure_channel(prefill.ref.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(
                prefill_pb2.PrefillRequest(worker=stale),
                timeout=10,
                metadata=[("traceparent", by.traceparent), ("diptych-request-id", f"mine-{by.span_id}")],
            )
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    (line,) = traced.log_lines(by.trace_id)
    assert f"prefill-0 request=mine-{by.span_id} trace={by.trace_id} Prefill: FAILED_PRECONDITION" in line
