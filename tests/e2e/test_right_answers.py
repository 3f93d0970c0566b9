"""Tokens through the whole mesh equal transformers' own `generate` in fp32, disaggregated and aggregated.

The reference is computed by transformers alone: its model, its cache, its attention; nothing is ever padded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
import torch
from asking import Answer, ask, request, until_free
from by_hand import services_by_hand
from meshes import Mesh
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.engine.catalog import resolve

NEW_TOKENS = 10
AT_ONCE = 8
LENGTHS = [1, 1, 1, 1, 15, 15, 15, 16, 16, 16, 17, 17, 17, 100, 100, 100, 1000]
CHATS = ["What is the capital of France?", "Write one line about the sea.", "Count: one, two,"]


def prompts(folder: str, vocab: int) -> list[list[int]]:
    """20 prompts: 17 of random ids with the lengths above, 3 chats."""
    generator = torch.Generator().manual_seed(11)
    ids = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in LENGTHS]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in CHATS
    ]
    return [*ids, *chats]


def reference(folder: str, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    """What transformers' generate answers, greedily; ends with an end-of-sequence token like the mesh does.

    Prompts of one length are one batch: most of a step is reading the weights.
    """
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = model.generation_config.eos_token_id
    answers: dict[int, list[int]] = {}
    for length in {len(ids) for ids in asked}:
        batch = [index for index, ids in enumerate(asked) if len(ids) == length]
        ids = torch.tensor([asked[index] for index in batch])
        with torch.inference_mode():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )
        answers |= {i: ended(row, ends) for i, row in zip(batch, whole[:, length:].tolist(), strict=True)}
    return [answers[index] for index in range(len(asked))]


def ended(row: list[int], ends: int | list[int] | None) -> list[int]:
    """An answer of a batch without what stands behind its end because another one's went on."""
    known = ends if isinstance(ends, list) else [ends]
    return next((row[: at + 1] for at, token in enumerate(row) if token in known), row)


async def ask_all(mesh: Mesh, asked: Sequence[Sequence[int]], at_once: int, **sampling: object) -> list[Answer]:
    """Asks every prompt, `at_once` at a time, in order of the prompts."""
    slots = asyncio.Semaphore(at_once)

    async def one(ids: Sequence[int]) -> Answer:
        async with slots:
            return await ask(mesh, request(ids, max_tokens=NEW_TOKENS, **sampling))

    return list(await asyncio.gather(*(one(ids) for ids in asked)))


def check_usage(answers: Sequence[Answer], asked: Sequence[Sequence[int]]) -> None:
    for answer, ids in zip(answers, asked, strict=True):
        assert answer.finish is not None
        assert answer.finish.usage.prompt_tokens == len(ids)
        assert answer.finish.usage.completion_tokens == len(answer.token_ids)
        assert answer.finish.usage.cached_tokens == 0


async def compare(folder: str, model: str, vocab: int, redis_url: str) -> None:
    """Disaggregated first; then the prefill worker is taken away for good, and decode prefills by itself.

    Without a prefix cache: the second time, decode would know every prompt.
    """
    asked = prompts(folder, vocab)
    expected = reference(folder, asked)
    assert len({tuple(answer) for answer in expected}) > len(expected) // 2, "the reference says the same all the time"
    with services_by_hand(model, redis_url, worker=("--dtype=fp32", "--prefix-cache=off")) as made:
        for disaggregated in (True, False):
            if not disaggregated:
                made.end("prefill")
            answers = await ask_all(made.mesh, asked, AT_ONCE)
            assert [answer.token_ids for answer in answers] == expected
            check_usage(answers, asked)
            for answer in answers:
                assert (answer.phases.transfer.transport == "ucx") == disaggregated
                assert answer.phases.local_prefill_reason == ("" if disaggregated else "no prefill worker")
                assert answer.phases.placements == 1
        await until_free(made.mesh)


@pytest.mark.slow
@pytest.mark.timeout(280)
async def test_the_embedded_model_answers_like_generate(redis_url: str) -> None:
    """F3 is among them: prompts of 1, block−1, block and block+1 tokens."""
    folder = str(resolve("smollm2", progress=print).path)
    await compare(folder, "smollm2", 49_152, redis_url)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "gpt2", "opt"])
async def test_other_architectures_answer_like_generate(
    tiny_model: Callable[[str], str], redis_url: str, architecture: str
) -> None:
    """F3 is among them: prompts of 1, block−1, block and block+1 tokens."""
    folder = tiny_model(architecture)
    await compare(folder, folder, 352, redis_url)


async def test_the_same_seed_gives_the_same_text_alone_in_a_batch_and_aggregated(
    mesh: Mesh, aggregated_mesh: Mesh
) -> None:
    asked = [[5 + i, 40, 41, 42 + i, 50] * (3 + i) for i in range(8)]
    sampling = {"sampling": {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 1234}}
    alone = [(await ask_all(mesh, [ids], 1, **sampling))[0].token_ids for ids in asked]
    batch = [answer.token_ids for answer in await ask_all(mesh, asked, 8, **sampling)]
    aggregated = [answer.token_ids for answer in await ask_all(aggregated_mesh, asked, 8, **sampling)]
    assert alone == batch == aggregated
    other = {"sampling": {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 4321}}
    assert [answer.token_ids for answer in await ask_all(mesh, asked, 8, **other)] != alone


async def test_without_a_seed_two_answers_differ(mesh: Mesh) -> None:
    sampling = {"sampling": {"temperature": 1.5}}
    first, second = await ask_all(mesh, [[9, 10, 11]] * 2, 2, **sampling)
    assert first.token_ids != second.token_ids
