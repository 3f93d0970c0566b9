"""Several answers of one prompt through the whole mesh: the texts of as many requests, for the transfer of one. F6."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import grpc.aio
import openai
import pytest
from asking import LIMIT_S, ask, request, until_free, workers
from diptych.v1 import gateway_pb2, gateway_pb2_grpc
from meshes import Mesh, StartMesh, start
from test_shared_prefixes import TINY_TOKEN_BYTES, prompt_of, whole_blocks
from traces import Span, caller, collecting

from services.gateway.request import answer_seed

BLOCK = 16
# A random model is nearly indifferent among all tokens: with many candidates, one draw in a thousand falls so close to
# the border between two of them that another cut of the prompt rounds it to the other side.
SAMPLING = {"temperature": 0.9, "top_k": 3, "seed": 1234}
Answers = dict[int, list[int]]
"""Token ids by answer."""


def asked(prompt: Sequence[int], answers: int, **fields: object) -> gateway_pb2.GenerateRequest:
    return request(
        prompt, **({"max_tokens": 30, "ignore_eos": True, "sampling": SAMPLING, "answers": answers} | fields)
    )


async def ask_for(
    mesh: Mesh,
    wish: gateway_pb2.GenerateRequest,
    *,
    metadata: Sequence[tuple[str, str]] = (),
    after: Callable[[Answers], None] = lambda answers: None,
) -> tuple[Answers, dict[int, gateway_pb2.Finish]]:
    """All answers and their finishes; `after` is called with what is there after each message."""
    answers: Answers = {}
    finishes: dict[int, gateway_pb2.Finish] = {}
    async with grpc.aio.insecure_channel(mesh.grpc) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(wish, timeout=LIMIT_S, metadata=metadata)
        async for message in call:
            answers.setdefault(message.index, []).extend(message.token_ids)
            if message.HasField("finish"):
                finishes[message.index] = message.finish
            after(answers)
    return answers, finishes


def count(spans: Sequence[Span]) -> Counter[str]:
    """Spans by name."""
    return Counter(span.name for span in spans)


async def apart(mesh: Mesh, prompt: Sequence[int], answers: int, **fields: object) -> Answers:
    """What the answers must be: those of as many requests, each with the seed that is promised."""
    wishes = [asked(prompt, 1, sampling=SAMPLING | {"seed": answer_seed(1234, i)}, **fields) for i in range(answers)]
    found = await asyncio.gather(*(ask(mesh, wish) for wish in wishes))
    return {index: answer.token_ids for index, answer in enumerate(found)}


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 300])
async def test_four_answers_are_those_of_four_requests_and_the_kv_moves_once(
    mesh: Mesh, aggregated_mesh: Mesh, tokens: int
) -> None:
    prompt = prompt_of(tokens, seed=1000 + tokens)
    expected = await apart(aggregated_mesh, prompt, 4)
    assert len({tuple(answer) for answer in expected.values()}) > 1, "the seeds make no difference"
    answers, finishes = await ask_for(mesh, asked(prompt, 4))
    assert answers == expected
    assert finishes[0].phases.transfer.bytes == tokens * TINY_TOKEN_BYTES
    assert not any(finishes[index].phases.HasField("transfer") for index in (1, 2, 3))
    assert [finishes[index].usage.prompt_tokens for index in range(4)] == [tokens, 0, 0, 0]
    assert [finishes[index].usage.completion_tokens for index in range(4)] == [30] * 4
    await until_free(mesh)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_the_sender_offers_once_and_the_others_compute_less_than_two_blocks(tiny_llama: str) -> None:
    """By the workers' own spans: one prompt computed by prefill, one transfer, three ends of prompts at decode."""
    with collecting() as collector:
        mesh = start(tiny_llama, extra=[f"--otlp={collector.endpoint}"])
        try:
            by = caller()
            await ask_for(mesh, asked(prompt_of(300, seed=77), 4), metadata=[("traceparent", by.traceparent)])
            spans = collector.wait(
                by.trace_id, lambda spans: count(spans)["gateway.request"] == 1 and count(spans)["decode.run"] == 4
            )
        finally:
            mesh.stop()
    found = count(spans)
    assert found["gateway.request"] == found["scheduler.place"] == 1
    assert found["prefill.queue"] == found["kv.transfer"] == 1
    computed = [span for span in spans if span.name == "prefill.compute"]
    assert Counter(span.service for span in computed) == {"diptych-prefill": 1, "diptych-decode": 3}
    known = {span.attributes["diptych.cached_tokens"] for span in computed if span.service == "diptych-decode"}
    assert known == {whole_blocks(300)}
    (moved,) = [span for span in spans if span.name == "kv.transfer"]
    assert moved.attributes["diptych.bytes"] == 300 * TINY_TOKEN_BYTES


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_without_a_prefix_cache_the_answers_are_the_same(start_mesh: StartMesh) -> None:
    mesh = start_mesh(environ={"DIPTYCH_PREFIX_CACHE": "off"})
    prompt = prompt_of(100, seed=78)
    expected = await apart(mesh, prompt, 4)
    assert (await ask_for(mesh, asked(prompt, 4)))[0] == expected
    await until_free(mesh)


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_a_pool_too_small_for_all_answers_serves_them_and_frees_everything(
    mesh: Mesh, start_mesh: StartMesh
) -> None:
    """85 blocks; each of 16 answers grows to 10 of its own behind 12 shared ones. The other mesh has room for all."""
    small = start_mesh(extra=["--kv-mib=1"])
    prompt = prompt_of(200, seed=79)
    expected = await apart(mesh, prompt, 16, max_tokens=150)
    answers, finishes = await ask_for(small, asked(prompt, 16, max_tokens=150))
    assert answers == expected and len(finishes) == 16
    await until_free(small)


@pytest.mark.parametrize("answers", [2, 16])
async def test_one_token_each_is_prefills_alone_and_frees_everything(mesh: Mesh, answers: int) -> None:
    prompt = prompt_of(100, seed=80 + answers)
    expected = await apart(mesh, prompt, answers, max_tokens=1)
    found, finishes = await ask_for(mesh, asked(prompt, answers, max_tokens=1))
    assert found == expected
    assert not any(finish.phases.transfer.bytes for finish in finishes.values())
    await until_free(mesh)


async def test_a_client_that_goes_away_frees_all_answers(mesh: Mesh) -> None:
    class GoneAway(Exception):
        pass

    def leave(answers: Answers) -> None:
        if len(answers) == 4:
            raise GoneAway

    with pytest.raises(GoneAway):
        await ask_for(mesh, asked(prompt_of(100, seed=81), 4, max_tokens=900), after=leave)
    await until_free(mesh, limit_s=5)


async def busy_decode_worker(mesh: Mesh) -> str:
    """Its name, as soon as the scheduler knows of one."""
    for _ in range(100):
        if busy := [worker.ref.name for worker in await workers(mesh) if worker.running]:
            return busy[0]
        await asyncio.sleep(0.05)
    raise AssertionError("no worker is busy")


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_a_decode_worker_killed_in_mid_answers_changes_none_of_them(start_mesh: StartMesh) -> None:
    mesh = start_mesh(decode=2)
    prompt, long = prompt_of(100, seed=82), {"max_tokens": 1000}
    expected = await apart(mesh, prompt, 4, **long)
    await until_free(mesh)  # nobody is busy with anything else
    processes = mesh.children()
    under_way = asyncio.Event()

    def look(answers: Answers) -> None:
        if len(answers) == 4 and all(len(answer) > 5 for answer in answers.values()):
            under_way.set()

    asking = asyncio.create_task(ask_for(mesh, asked(prompt, 4, **long), after=look))
    await under_way.wait()
    killed = await busy_decode_worker(mesh)
    assert killed.startswith("decode") and not asking.done()
    processes[killed].kill()
    answers, finishes = await asking
    assert answers == expected
    assert all(finish.phases.placements == 2 for finish in finishes.values())
    assert killed not in {finish.phases.decode_worker for finish in finishes.values()}
    await until_free(mesh)


async def test_the_openai_client_gets_n_different_choices(mesh: Mesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{mesh.http}/v1", api_key="none", timeout=60) as client:
        found = await client.completions.create(
            model="tiny-llama", prompt=prompt_of(40, seed=83), n=3, temperature=1.5, max_tokens=20, seed=5
        )
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len({choice.text for choice in found.choices}) == 3
    assert found.usage is not None and found.usage.prompt_tokens == 40
