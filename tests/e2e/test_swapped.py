"""A mesh whose KV memory is too small for its requests: whoever gives way, and however, the texts stay the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

import grpc.aio
import pytest
from asking import Answer, ask, request, until_free, workers
from diptych.v1 import gateway_pb2, request_pb2
from meshes import Mesh, StartMesh, start
from traces import Collector, Span, caller, collecting

AT_ONCE = 8
NEW_TOKENS = 120
SMALL = ("--kv-mib=1", "--chunk-tokens=64")
MLFQ = {"DIPTYCH_SCHEDULE": "mlfq", "DIPTYCH_MAX_BATCH": "2"}
SAMPLED = request_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=77)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def swapping_mesh(tiny_llama: str, collector: Collector) -> Iterator[Mesh]:
    """Swaps what gives way, beside the steps; its spans go to the collector."""
    shared = start(tiny_llama, extra=[*SMALL, f"--otlp={collector.endpoint}"], environ=MLFQ)
    yield shared
    shared.stop()


def asked(*, swaps: bool = True) -> list[gateway_pb2.GenerateRequest]:
    """Prompts of about 200 tokens; every second answer is long, two of four are sampled. Together they need about 150
    blocks; a worker has 85 in fp32, 170 in bf16.

    Where nothing is swapped, no more is placed on a worker than is expected to fit: two answers, longer than expected.
    """
    rng = random.Random(5)
    if not swaps:
        prompts = [[rng.randrange(3, 300) for _ in range(100)] for _ in range(2)]
        return [request(prompt, max_tokens=650, ignore_eos=True, sampling=SAMPLED) for prompt in prompts]
    return [
        request(
            [rng.randrange(3, 300) for _ in range(190 + 5 * i)],
            max_tokens=NEW_TOKENS if i % 2 else NEW_TOKENS // 2,
            ignore_eos=True,
            sampling=SAMPLED if is_sampled(i) else None,
        )
        for i in range(AT_ONCE)
    ]


def is_sampled(index: int) -> bool:
    """Whether that request of `asked` is; as many long answers are as short ones."""
    return index // 2 % 2 == 1


async def alone(mesh: Mesh, requests: Sequence[gateway_pb2.GenerateRequest]) -> list[Answer]:
    return [await ask(mesh, one) for one in requests]


async def together(
    mesh: Mesh, requests: Sequence[gateway_pb2.GenerateRequest], metadata: Sequence[tuple[str, str]] = ()
) -> list[Answer]:
    return list(await asyncio.gather(*(ask(mesh, one, metadata=metadata) for one in requests)))


def of_turns(answers: Sequence[Answer], name: str) -> int:
    return sum(getattr(answer.phases.turns, name) for answer in answers)


async def compare(mesh: Mesh, *, swap: str, dtype: str) -> None:
    """K6, K7: the texts of requests that are alone, and of all of them at once."""
    requests = asked(swaps=swap != "recompute")
    undisturbed = await alone(mesh, requests)
    assert of_turns(undisturbed, "preemptions") == of_turns(undisturbed, "swapped_bytes") == 0
    answers = await together(mesh, requests)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in undisturbed]
    if swap == "recompute":
        assert of_turns(answers, "recomputed") > 0 and of_turns(answers, "swapped_bytes") == 0
    for sampled in (False, True) if swap != "recompute" else ():
        of_kind = [answer for index, answer in enumerate(answers) if is_sampled(index) == sampled]
        assert of_turns(of_kind, "preemptions") > 0
        assert dtype == "bf16" or of_turns(of_kind, "swapped_bytes") > 0
    await until_free(mesh)
    (decode,) = [worker for worker in await workers(mesh) if worker.ref.name == "decode-0"]
    assert decode.schedule == "mlfq" and sum(decode.level_requests) == decode.swapped_requests == 0


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_texts_are_the_same_where_kv_is_swapped_beside_the_steps(swapping_mesh: Mesh) -> None:
    """K6, K7."""
    await compare(swapping_mesh, swap="proactive", dtype="fp32")


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("prefill", "swap", "dtype"),
    [
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
    mesh = start_mesh(prefill=prefill, dtype=dtype, extra=SMALL, environ=MLFQ | {"DIPTYCH_SWAP": swap})
    await compare(mesh, swap=swap, dtype=dtype)


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_clients_that_go_away_while_their_kv_is_swapped_leak_nothing(swapping_mesh: Mesh) -> None:
    """K1, swapped."""
    mesh = swapping_mesh
    requests = asked()
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
    swapping_mesh: Mesh, collector: Collector
) -> None:
    def decoded(spans: Sequence[Span]) -> list[Span]:
        return [span for span in spans if span.name == "decode.run"]

    by = caller()
    answers = await together(swapping_mesh, asked(), metadata=[("traceparent", by.traceparent)])
    runs = decoded(collector.wait(by.trace_id, lambda spans: len(decoded(spans)) == AT_ONCE))
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
