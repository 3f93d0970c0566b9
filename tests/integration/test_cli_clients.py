"""The clients against a scripted mesh: a real gRPC server that answers from a list."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import pytest
from click.testing import CliRunner, Result
from diptych.v1 import gateway_pb2, gateway_pb2_grpc, request_pb2, scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from loadtest.arrivals import Mix, plan
from loadtest.client import run_plan
from services.cli.__main__ import main
from services.rpc.convert import to_duration
from services.rpc.probe import serves


@dataclass
class Script(gateway_pb2_grpc.GatewayServiceServicer, scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers `messages`, then `error` if there is one. Keeps the requests."""

    messages: Sequence[gateway_pb2.GenerateResponse] = ()
    error: tuple[grpc.StatusCode, str] | None = None
    workers: Sequence[worker_pb2.WorkerView] = ()
    requests: list[gateway_pb2.GenerateRequest] = field(default_factory=list)

    def Generate(  # noqa: N802 - gRPC's name
        self, request: gateway_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[gateway_pb2.GenerateResponse]:
        self.requests.append(request)
        yield from self.messages
        if self.error is not None:
            context.abort(*self.error)

    def ListWorkers(  # noqa: N802 - gRPC's name
        self, request: scheduler_pb2.ListWorkersRequest, context: grpc.ServicerContext
    ) -> scheduler_pb2.ListWorkersResponse:
        return scheduler_pb2.ListWorkersResponse(workers=self.workers, queued_requests=4)


@dataclass
class Mesh:
    script: Script
    address: str
    health: health.HealthServicer


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    script, health_servicer = Script(), health.HealthServicer()
    pool = ThreadPoolExecutor(8)
    server = grpc.server(pool)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(script, server)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(script, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Mesh(script, f"127.0.0.1:{port}", health_servicer)
    server.stop(None).wait()
    pool.shutdown()


def answer(texts: Sequence[str]) -> list[gateway_pb2.GenerateResponse]:
    transfer = request_pb2.TransferReport(
        bytes=23040, pieces=3, transport="ucx", duration=to_duration(0.02), exposed=to_duration(0.004)
    )
    transfer.gigabytes_per_second, transfer.encoding = 0.5, "int8"
    phases = request_pb2.Phases(
        queue=to_duration(0.001),
        prefill_compute=to_duration(0.25),
        prefill_chunks=2,
        transfer=transfer,
        first_token=to_duration(0.3),
        time_per_token=to_duration(0.04),
        total=to_duration(0.5),
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        placements=1,
    )
    usage = request_pb2.Usage(prompt_tokens=38, completion_tokens=len(texts))
    finish = gateway_pb2.Finish(reason=request_pb2.FINISH_REASON_STOP, usage=usage, phases=phases)
    parts = [gateway_pb2.GenerateResponse(text=text, token_ids=[index]) for index, text in enumerate(texts)]
    return [gateway_pb2.GenerateResponse(request_id="r"), *parts, gateway_pb2.GenerateResponse(finish=finish)]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_generate_streams_the_text_to_stdout_and_the_phases_to_stderr(mesh: Mesh) -> None:
    mesh.script.messages = answer(["The capital", " is", " Paris."])
    result = run("generate", "What?", "--grpc", mesh.address)
    assert result.exit_code == 0, result.output
    assert result.stdout == "The capital is Paris.\n"
    for words in ("23,040 B in 3", "ucx as int8", "0.500 GB/s", "300.0 ms", "prefill-0"):
        assert words in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(("pieces", "words"), [(1, "23,040 B in 1 piece over"), (3, "23,040 B in 3 pieces over")])
def test_pieces_are_counted_in_good_english(mesh: Mesh, pieces: int, words: str) -> None:
    mesh.script.messages = answer(["x"])
    mesh.script.messages[-1].finish.phases.transfer.pieces = pieces
    assert words in run("generate", "What?", "--grpc", mesh.address).stderr


@pytest.mark.parametrize("limit_s", ["0", "-1"])
def test_a_limit_that_is_over_already_is_refused_by_name(mesh: Mesh, limit_s: str) -> None:
    """It was sent, and answered with an unexplained DEADLINE_EXCEEDED."""
    result = run("generate", "What?", "--grpc", mesh.address, "--limit-s", limit_s)
    assert result.exit_code == 2 and "--limit-s" in result.stderr
    assert mesh.script.requests == []


def test_generate_asks_for_penalties_and_logprobs_and_shows_them_in_json(mesh: Mesh) -> None:
    mesh.script.messages = answer(["Pa", "ris"])
    for message in mesh.script.messages[1:3]:
        message.logprobs.add(logprob=-0.5, top_token_ids=[7], top_logprobs=[-0.25])
    flags = ("--repetition-penalty=1.5", "--presence-penalty=1", "--frequency-penalty=-2", "--logprobs=1")
    result = run("generate", "What?", "--grpc", mesh.address, "--json", *flags)
    assert json.loads(result.stdout)["logprobs"] == [{"logprob": -0.5, "top": [[7, -0.25]]}] * 2
    sent = mesh.script.requests[0].sampling
    assert (sent.repetition_penalty, sent.presence_penalty, sent.frequency_penalty) == (1.5, 1.0, -2.0)
    assert sent.logprobs == 1


def test_generate_json_is_one_line_with_text_usage_and_phases(mesh: Mesh) -> None:
    mesh.script.messages = answer(["Pa", "ris"])
    result = run("generate", "What?", "--grpc", mesh.address, "--json")
    (line,) = result.stdout.splitlines()
    values = json.loads(line)
    assert (values["text"], values["token_ids"], values["finish_reason"]) == ("Paris", [0, 1], "stop")
    assert values["usage"] == {"prompt_tokens": 38, "completion_tokens": 2, "cached_tokens": 0}
    phases = values["phases"]
    assert phases["transfer"] == {
        "bytes": 23040,
        "pieces": 3,
        "transport": "ucx",
        "duration_s": 0.02,
        "exposed_s": 0.004,
        "gigabytes_per_second": 0.5,
        "encoding": "int8",
    }
    assert (phases["first_token_s"], phases["tokenize_s"], phases["placements"]) == (0.3, None, 1)


def several(*texts: str) -> list[gateway_pb2.GenerateResponse]:
    """An answer for each text, their messages mixed."""
    made = [answer([text]) for text in texts]
    for index, messages in enumerate(made):
        for message in messages:
            message.index = index
    return [message for messages in zip(*made, strict=True) for message in messages]


def test_generate_shows_several_answers_one_after_the_other(mesh: Mesh) -> None:
    mesh.script.messages = several("Paris.", "It is Paris.")
    shown = run("generate", "What?", "--grpc", mesh.address, "--answers", "2")
    assert shown.stdout == "[1 of 2] Paris.\n[2 of 2] It is Paris.\n"
    assert "prefill-0" in shown.stderr
    lines = run("generate", "What?", "--grpc", mesh.address, "--answers=2", "--json").stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["Paris.", "It is Paris."]
    assert [request.answers for request in mesh.script.requests] == [2, 2]


def test_an_answer_of_several_that_lacks_its_finish_is_a_failure(mesh: Mesh) -> None:
    mesh.script.messages = several("Paris.", "It is Paris.")[:-1]
    result = run("generate", "What?", "--grpc", mesh.address, "--answers", "2", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "broke off" in result.stderr


def test_generate_sends_what_was_asked_for_and_leaves_the_rest_absent(mesh: Mesh) -> None:
    mesh.script.messages = answer(["x"])
    run("generate", "hi", "--grpc", mesh.address)
    flags = "--raw --max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --seed 3 --stop A --stop B"
    run("generate", "hi", "--grpc", mesh.address, "--ignore-eos", *flags.split())
    plain, full = mesh.script.requests
    assert plain.chat.messages[0].content == "hi"
    assert not plain.sampling.HasField("top_p")
    assert not plain.sampling.HasField("seed")
    assert (full.text, full.max_tokens, list(full.stop), full.ignore_eos) == ("hi", 5, ["A", "B"], True)
    assert (full.sampling.top_k, full.sampling.seed) == (7, 3)
    assert full.sampling.top_p == pytest.approx(0.9)


def test_a_failure_is_one_line_with_its_code(mesh: Mesh) -> None:
    mesh.script.error = (grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: too many")
    result = run("generate", "hi", "--grpc", mesh.address)
    assert result.exit_code == 1
    assert result.stderr == "error: INVALID_ARGUMENT: max_tokens: too many\n"


def test_a_failure_in_mid_stream_is_no_answer(mesh: Mesh) -> None:
    mesh.script.messages = answer(["half"])[:2]
    mesh.script.error = (grpc.StatusCode.ABORTED, "lost")
    result = run("generate", "hi", "--grpc", mesh.address, "--json")
    assert (result.exit_code, result.stdout) == (1, "")


def test_a_stream_that_ends_without_a_finish_is_a_failure(mesh: Mesh) -> None:
    mesh.script.messages = answer(["half"])[:2]
    result = run("generate", "hi", "--grpc", mesh.address, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "broke off" in result.stderr


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_nobody_there_is_unavailable() -> None:
    for arguments in (("generate", "hi", "--grpc", free_address()), ("workers", "--scheduler", free_address())):
        result = run(*arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: UNAVAILABLE: ")
        assert result.stderr.count("\n") == 1


def test_workers_are_listed_for_people_and_for_programs(mesh: Mesh) -> None:
    mesh.script.workers = [
        worker_pb2.WorkerView(
            ref=worker_pb2.WorkerRef(name="decode-0", address="127.0.0.1:1", incarnation="0123456789abcdef"),
            role=worker_pb2.ROLE_DECODE,
            state=worker_pb2.WORKER_STATE_READY,
            blocks=worker_pb2.BlockCounts(total=104, free=97, held=2, leased=1, swapped=4, cached=33),
            swapped_requests=3,
            level_requests=[5, 0, 2, 0, 0],
            schedule="auto (mlfq)",
            heartbeat_age=to_duration(0.5),
            prefill_fit=worker_pb2.PrefillFit(a_s=0.01, b_s=1e-3, c_s=1e-7, chunk_tokens=256, error=0.0625, steps=40),
            links=[
                worker_pb2.Link(
                    peer="prefill-0",
                    peer_incarnation="fedcba9876543210",
                    transport="ucx",
                    lanes="tcp/lo",
                    bytes_per_s=1.25e9,
                    round_trip=to_duration(310e-6),
                    warning="plain TCP where a GPU should carry it",
                ),
                worker_pb2.Link(peer="prefill-1", error="nobody there"),
            ],
        )
    ]
    shown = run("workers", "--scheduler", mesh.address)
    assert all(
        word in shown.stdout
        for word in ("decode-0", "ready", "0123456789abcdef", "97/104", "1140.0 ms ± 6%", "4 requests queued")
    )
    assert all(word in shown.stdout for word in ("tcp/lo", "1.25", "310 µs", "plain TCP where", "nobody there"))
    listed = json.loads(run("workers", "--scheduler", mesh.address, "--json").stdout)
    assert listed["queued_requests"] == 4
    (worker,) = listed["workers"]
    assert (worker["role"], worker["state"], worker["heartbeat_age_s"]) == ("decode", "ready", 0.5)
    assert (worker["blocks_held"], worker["blocks_cached"], worker["blocks_swapped"]) == (2, 33, 4)
    assert (worker["schedule"], worker["levels"], worker["swapped"]) == ("auto (mlfq)", [5, 0, 2, 0, 0], 3)
    assert "auto (mlfq) 5/0/2" in " ".join(shown.stdout.split())
    # 4 chunks of at most 256 tokens, 1,000 tokens, 1,000 tokens squared
    assert worker["prefill_1000_tokens_ms"] == pytest.approx(4 * 10 + 1_000 + 100)
    assert worker["prefill_fit"] == {
        "a_s": 0.01,
        "b_s": 1e-3,
        "c_s": 1e-7,
        "chunk_tokens": 256,
        "error": 0.0625,
        "steps": 40,
    }
    assert (worker["step_fit"], worker["step_batch_1_ms"]) == (None, None)
    measured, failed = worker["links"]
    assert (measured["peer"], measured["lanes"], measured["gbs"]) == ("prefill-0", "tcp/lo", 1.25)
    assert measured["round_trip_us"] == pytest.approx(310)
    assert (failed["error"], failed["gbs"]) == ("nobody there", 0.0)


def test_the_probe_knows_serving_from_not_serving_from_nobody(mesh: Mesh) -> None:
    mesh.health.set("", health_pb2.HealthCheckResponse.SERVING)
    assert serves(mesh.address)
    mesh.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert not serves(mesh.address)
    assert not serves(free_address())


async def test_the_load_client_measures_answers_and_counts_failures(mesh: Mesh) -> None:
    mesh.script.messages = answer(["a", "b", "c"])
    planned = plan(200.0, 0.05, seed=1, mix=Mix(max_tokens=(3, 3)))
    assert planned
    measured = await run_plan(mesh.address, planned, limit_s=30, clock=time.monotonic)
    assert len(measured) == len(planned)
    for one in measured:
        assert (one.error, one.tokens, len(one.gaps_s)) == ("", 3, 2)
        assert one.first_token_s is not None
        assert 0 < one.first_token_s <= one.total_s
    assert {request.text for request in mesh.script.requests} == {request.prompt for request in planned}
    assert all(request.ignore_eos for request in mesh.script.requests)

    mesh.script.error = (grpc.StatusCode.UNAVAILABLE, "no worker")
    assert {one.error for one in await run_plan(mesh.address, planned, limit_s=30, clock=time.monotonic)} == {
        "UNAVAILABLE"
    }


async def test_an_answer_that_is_too_short_is_an_error_of_the_load_test(mesh: Mesh) -> None:
    mesh.script.messages = answer(["a"])
    planned = plan(200.0, 0.05, seed=1, mix=Mix(max_tokens=(3, 3)))
    measured = await run_plan(mesh.address, planned, limit_s=30, clock=time.monotonic)
    assert {one.error for one in measured} == {"1 tokens instead of 3"}


def test_the_installed_command_says_what_it_can_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "--help"], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("up", "generate", "workers", "demo"))
