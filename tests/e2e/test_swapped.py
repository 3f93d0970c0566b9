"""A mesh whose KV memory is too small for its requests: whoever gives way, and however, the texts stay the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import grpc.aio
import pytest
from asking import Answer, ask, request, until_free, workers
from diptych.v1 import gateway_pb2
from meshes import Mesh, StartMesh
from traces import Span, collecting

AT_ONCE = 8
NEW_TOKENS = 120


def asked(*, sampled: bool, swaps: bool = True) -> list[gateway_pb2.GenerateRequest]:
    """Prompts of about 200 tokens; every second answer is long. Together they need about 150 blocks; a worker has 85 in
    fp32, 170 in bf16.

    Where nothing is swapped, no more is placed on a worker than is expected to fit: few answers, longer than expected.
    """
    rng = random.Random(5)
    sampling = {"sampling": {"temperature": 0.9, "top_p": 0.95, "seed": 77}} if sampled else {}
    if not swaps:
        prompts = [[rng.randrange(3, 300) for _ in range(100)] for _ in range(3)]
        return [request(prompt, max_tokens=700, ignore_eos=True, **sampling) for prompt in prompts]
    return [
        request(
            [rng.randrange(3, 300) for _ in range(190 + 5 * i)],
            max_tokens=NEW_TOKENS if i % 2 else NEW_TOKENS // 2,
            ignore_eos=True,
            **sampling,
        )
        for i in range(AT_ONCE)
    ]


async def alone(mesh: Mesh, requests: Sequence[gateway_pb2.GenerateRequest]) -> list[Answer]:
    return [await ask(mesh, one) for one in requests]


async def together(mesh: Mesh, requests: Sequence[gateway_pb2.GenerateRequest]) -> list[Answer]:
    return list(await asyncio.gather(*(ask(mesh, one) for one in requests)))


def of_turns(answers: Sequence[Answer], name: str) -> int:
    return sum(getattr(answer.phases.turns, name) for answer in answers)


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("prefill", "swap", "dtype"),
    [
        (1, "proactive", "fp32"),
        pytest.param(1, "reactive", "fp32", marks=pytest.mark.soak),
        pytest.param(1, "recompute", "fp32", marks=pytest.mark.soak),
        pytest.param(0, "proactive", "fp32", marks=pytest.mark.soak),
        pytest.param(0, "reactive", "fp32", marks=pytest.mark.soak),
        (0, "recompute", "fp32"),
        (1, "proactive", "bf16"),
    ],
)
async def test_texts_are_the_same_whoever_gives_way(start_mesh: StartMesh, prefill: int, swap: str, dtype: str) -> None:
    """K6, K7."""
    environ = {"DIPTYCH_SCHEDULE": "mlfq", "DIPTYCH_SWAP": swap, "DIPTYCH_MAX_BATCH": "2"}
    mesh = start_mesh(prefill=prefill, dtype=dtype, extra=["--kv-mib=1", "--chunk-tokens=64"], environ=environ)
    for sampled in (False, True) if swap != "recompute" else (True,):  # which takes longest
        requests = asked(sampled=sampled, swaps=swap != "recompute")
        undisturbed = await alone(mesh, requests)
        assert of_turns(undisturbed, "preemptions") == of_turns(undisturbed, "swapped_bytes") == 0
        answers = await together(mesh, requests)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in undisturbed]
        if swap == "recompute":
            assert of_turns(answers, "recomputed") > 0 and of_turns(answers, "swapped_bytes") == 0
        else:
            assert of_turns(answers, "preemptions") > 0
            assert dtype == "bf16" or of_turns(answers, "swapped_bytes") > 0
        await until_free(mesh)
    (decode,) = [worker for worker in await workers(mesh) if worker.ref.name == "decode-0"]
    assert decode.schedule == "mlfq" and sum(decode.level_requests) == decode.swapped_requests == 0


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_clients_that_go_away_while_their_kv_is_swapped_leak_nothing(start_mesh: StartMesh) -> None:
    """K1, swapped."""
    environ = {"DIPTYCH_SCHEDULE": "mlfq", "DIPTYCH_MAX_BATCH": "2"}
    mesh = start_mesh(extra=["--kv-mib=1", "--chunk-tokens=64"], environ=environ)
    requests = asked(sampled=False)
    expected = await alone(mesh, requests[:1])
    rng = random.Random(3)
    swapped = 0

    async def leave(one: gateway_pb2.GenerateRequest) -> None:
        with pytest.raises((TimeoutError, grpc.aio.AioRpcError)):
            await asyncio.wait_for(ask(mesh, one), rng.uniform(0.2, 1.2))

    async def watch() -> None:
        nonlocal swapped
        while True:
            swapped = max(swapped, *(worker.swapped_requests for worker in await workers(mesh)))
            await asyncio.sleep(0.1)

    for one in requests:
        one.max_tokens = 900
    watching = asyncio.create_task(watch())
    for _ in range(3):
        await asyncio.gather(*(leave(one) for one in requests))
        await until_free(mesh)
    watching.cancel()
    requests[0].max_tokens = NEW_TOKENS // 2
    again = await ask(mesh, requests[0])
    assert again.token_ids == expected[0].token_ids


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_the_trace_of_a_request_that_was_swapped_says_when_it_gave_way_and_when_it_came_back(
    start_mesh: StartMesh,
) -> None:
    def decoded(spans: Sequence[Span]) -> list[Span]:
        return [span for span in spans if span.name == "decode.run"]

    with collecting() as collector:
        environ = {"DIPTYCH_SCHEDULE": "mlfq", "DIPTYCH_MAX_BATCH": "2"}
        flags = ["--kv-mib=1", "--chunk-tokens=64", f"--otlp={collector.endpoint}"]
        mesh = start_mesh(extra=flags, environ=environ)
        answers = await together(mesh, asked(sampled=False))
        runs = decoded(collector.wait(None, lambda spans: len(decoded(spans)) == AT_ONCE))
        mesh.stop()
    told = sorted((turns.preemptions, turns.swapped_bytes) for turns in (answer.phases.turns for answer in answers))
    of = [run.attributes for run in runs]
    assert sorted((one["diptych.preemptions"], one["diptych.swapped_bytes"]) for one in of) == told
    swapped = [run for run in runs if run.attributes["diptych.swapped_bytes"]]
    assert swapped
    for run in swapped:
        names = [event.name for event in run.events]
        assert {"preempted", "demoted"} <= set(names)
        assert names.index("swap out") < names.index("swap in") < last(names, "resumed")
        assert [event.at_ns for event in run.events] == sorted(event.at_ns for event in run.events)
        assert all("diptych.level" in event.attributes for event in run.events)
        moved = [event.attributes["diptych.detail"] for event in run.events if event.name.startswith("swap")]
        assert all(str(detail).endswith(" bytes") for detail in moved)


def last(names: Sequence[str], name: str) -> int:
    return len(names) - 1 - names[::-1].index(name)
