"""Workers learn how fast they are from the requests they serve, and their membership says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from asking import ask, request, workers
from diptych.v1 import worker_pb2
from meshes import Mesh

from services.latency import Latency
from services.rpc.convert import latency_of

LIMIT_S = 15.0
PROMPT_TOKENS = 800


async def until(mesh: Mesh, holds: Callable[[dict[str, Latency]], bool]) -> dict[str, Latency]:
    """Waits until what the workers say about their speed, by name, is so; fails the test when it is not in time."""
    deadline_s = asyncio.get_running_loop().time() + LIMIT_S
    while not holds(said := by_name(await workers(mesh))):
        assert asyncio.get_running_loop().time() < deadline_s, said
        await asyncio.sleep(0.1)
    return said


def by_name(views: Sequence[worker_pb2.WorkerView]) -> dict[str, Latency]:
    return {view.ref.name: latency_of(view) for view in views}


async def compute_s(mesh: Mesh, first_token: int) -> float:
    """Serves one long prompt and some decoding; returns the seconds that its prompt took to compute."""
    prompt = [first_token, *(3 + i % 300 for i in range(PROMPT_TOKENS - 1))]
    answer = await ask(mesh, request(prompt, max_tokens=20, ignore_eos=True))
    return answer.phases.prefill_compute.ToNanoseconds() / 1e9


async def test_prefill_and_decode_each_publish_what_they_have_computed(mesh: Mesh) -> None:
    measured_s = sorted([await compute_s(mesh, first_token) for first_token in (11, 12, 13)])[1]
    chunks = 3 * -(-PROMPT_TOKENS // 64)

    def learned(said: dict[str, Latency]) -> bool:
        prefill = said["prefill-0"].prefill
        return prefill is not None and prefill.steps >= chunks and said["decode-0"].step is not None

    said = await until(mesh, learned)
    prefill, step = said["prefill-0"].prefill, said["decode-0"].step
    assert prefill is not None and step is not None
    assert prefill.chunk_tokens == 64
    assert measured_s / 3 < prefill.prompt_s(PROMPT_TOKENS) < measured_s * 3
    assert 0 < step.step_s(context_tokens=PROMPT_TOKENS, batch=1) < 1


async def test_an_aggregated_worker_publishes_both(aggregated_mesh: Mesh) -> None:
    for first_token in range(11, 16):
        await compute_s(aggregated_mesh, first_token)
    said = await until(aggregated_mesh, lambda said: None not in (said["decode-0"].prefill, said["decode-0"].step))
    fit = said["decode-0"].prefill
    assert fit is not None
    assert fit.chunk_tokens == 256
