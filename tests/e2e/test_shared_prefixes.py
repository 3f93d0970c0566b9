"""Prompts that begin alike: their KV is computed and moved once, and the answers stay those of `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio
import pytest
import torch
from asking import LIMIT_S, Answer, ask, request, until_free, workers
from diptych.v1 import gateway_pb2_grpc
from meshes import Mesh, StartMesh
from test_right_answers import NEW_TOKENS, ask_all, reference

BLOCK = 16
TINY_TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # layers × {K, V} × KV heads × head dim × fp32


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Random ids; no other test asks for a prompt that begins like it."""
    return torch.randint(3, 352, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def whole_blocks(tokens: int) -> int:
    """Tokens in whole blocks, the last token excepted: what can be cached of a prompt that is known as a whole."""
    return (tokens - 1) // BLOCK * BLOCK


def cached(answer: Answer) -> int:
    assert answer.finish is not None
    return answer.finish.usage.cached_tokens


@pytest.mark.parametrize("tokens", [100, 1000])
async def test_a_second_ask_is_cached_and_moves_only_the_rest(mesh: Mesh, tokens: int) -> None:
    prompt = prompt_of(tokens, seed=tokens)
    (expected,) = reference(mesh.model, [prompt])
    for known in (0, whole_blocks(tokens)):
        answer = await ask(mesh, request(prompt, max_tokens=NEW_TOKENS))
        assert answer.token_ids == expected
        assert cached(answer) == known
        assert answer.phases.transfer.bytes == (tokens - known) * TINY_TOKEN_BYTES
        assert answer.phases.prefill_chunks == -(-(tokens - known) // 64)
    await until_free(mesh)
    async with asyncio.timeout(LIMIT_S):
        # What workers say of themselves comes with their next heartbeat.
        while not all(worker.blocks.cached >= tokens // BLOCK for worker in await workers(mesh)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("tokens", [100, 1000])
async def test_a_second_ask_is_cached_where_decode_prefills_by_itself(aggregated_mesh: Mesh, tokens: int) -> None:
    prompt = prompt_of(tokens, seed=tokens)
    (expected,) = reference(aggregated_mesh.model, [prompt])
    for known in (0, whole_blocks(tokens)):
        answer = await ask(aggregated_mesh, request(prompt, max_tokens=NEW_TOKENS))
        assert answer.token_ids == expected
        assert cached(answer) == known
    await until_free(aggregated_mesh)


async def test_the_next_turn_of_a_conversation_moves_neither_prompt_nor_answer(
    mesh: Mesh, aggregated_mesh: Mesh
) -> None:
    """F7."""
    for one in (mesh, aggregated_mesh):
        prompt = prompt_of(90, seed=3)
        first = await ask(one, request(prompt, max_tokens=40, ignore_eos=True))
        known = whole_blocks(90 + 40)  # the last token of an answer has no KV
        prompt = [*prompt, *first.token_ids, 7, 8, 9]
        (expected,) = reference(one.model, [prompt])
        answer = await ask(one, request(prompt, max_tokens=NEW_TOKENS))
        assert answer.token_ids == expected
        if one is mesh:
            assert answer.phases.transfer.bytes == (len(prompt) - known) * TINY_TOKEN_BYTES
            assert cached(answer) == 80, "prefill knows the prompt, not the answer"
        else:
            assert cached(answer) == known


async def cancelled_after(mesh: Mesh, prompt: Sequence[int], other: asyncio.Event) -> None:
    """Asks, and hangs up as soon as `other` is set."""
    async with grpc.aio.insecure_channel(mesh.grpc) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request(prompt, max_tokens=900), timeout=LIMIT_S)
        await other.wait()
        call.cancel()


async def test_requests_at_once_share_a_prefix_and_a_cancelled_one_takes_nothing_away(mesh: Mesh) -> None:
    common = prompt_of(700, seed=4)
    prompts = [[*common, *prompt_of(tokens, seed=5)] for tokens in (1, 15, 16, 17, 300)]
    expected = reference(mesh.model, prompts)
    answered = asyncio.Event()

    async def first() -> list[Answer]:
        answers = await ask_all(mesh, prompts[:1], 1)
        answered.set()
        return answers

    early, late, _ = await asyncio.gather(
        first(), ask_all(mesh, prompts[1:], 8), cancelled_after(mesh, [*common, *prompt_of(900, seed=6)], answered)
    )
    assert [answer.token_ids for answer in (*early, *late)] == expected
    again = await ask_all(mesh, prompts, 8)
    assert [answer.token_ids for answer in again] == expected
    assert [cached(answer) for answer in again] == [whole_blocks(len(prompt)) for prompt in prompts]
    await until_free(mesh)


@pytest.mark.slow
async def test_workers_with_little_memory_evict_and_still_answer_right(start_mesh: StartMesh) -> None:
    """85 blocks a worker; the prompts fill over 300."""
    mesh = start_mesh(extra=["--kv-mib=1", "--chunk-tokens=64"])
    commons = [prompt_of(200, seed=seed) for seed in range(10, 14)]
    prompts = [[*common, *prompt_of(tail, seed=20 + tail)] for tail in (3, 16, 120, 250) for common in commons]
    expected = reference(mesh.model, prompts)
    for _ in range(2):
        answers = await ask_all(mesh, prompts, 8)
        assert [answer.token_ids for answer in answers] == expected
    assert any(cached(answer) for answer in answers)
    await until_free(mesh)
