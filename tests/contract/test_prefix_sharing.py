"""Shared prefixes with a real model: every answer is that of transformers' `generate`, however its KV came about.

The cores run with the engine over an arena in which every block that is given out as empty is full of NaN: who reads KV
that was neither computed, nor received, nor kept for its prefix gets NaN, and no answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, make_tiny
from transformers import AutoModelForCausalLM

from kvtransfer.blocks import BlockPool
from kvtransfer.contents import BlockKey
from services.decode import messages as decode
from services.decode.core import DecodeCore
from services.decode.memory import Memory
from services.engine.card import read_card
from services.engine.generic import GenericRunner
from services.engine.model import LoadedModel, load
from services.engine.prefix import PrefixCache
from services.engine.sampling import SamplingSpec
from services.prefill import messages as prefill
from services.prefill.core import PrefillCore
from services.schedule.budget import Bandwidth, Reserve
from services.schedule.fcfs import fcfs
from services.schedule.swap import SwapMode, Swapper
from services.worker.executor import Executor

BLOCK = 16
NEW_TOKENS = 8


class SpoilingPool(BlockPool):
    """Spoils every block that it gives out as empty."""

    def __init__(self, arena: np.ndarray) -> None:
        super().__init__(arena.shape[2])
        self._arena = arena

    def allocate(self, blocks: int, owner: str, keys: Sequence[BlockKey] = ()) -> tuple[int, ...]:
        given = super().allocate(blocks, owner, keys)
        self._arena[:, :, list(given[len(keys) :])] = np.nan
        return given

    def extend(self, owner: str, blocks: int) -> tuple[int, ...]:
        given = super().extend(owner, blocks)
        self._arena[:, :, list(given)] = np.nan
        return given


def decode_core(pool: BlockPool, prefix: PrefixCache) -> DecodeCore:
    """Who gives way is computed again."""
    swapper = Swapper(
        mode=SwapMode.RECOMPUTE,
        block_bytes=1,
        block_tokens=BLOCK,
        bandwidth=Bandwidth(bytes_per_s=1e9),
        reserve=Reserve(total_blocks=pool.counts().total),
    )
    memory = Memory(pool=pool, host=BlockPool(0), prefix=prefix, swapper=swapper)
    return DecodeCore(memory=memory, policy=fcfs(), chunk_tokens=48, max_batch=4)


def prefill_core(pool: BlockPool, prefix: PrefixCache) -> PrefillCore:
    return PrefillCore(policy=fcfs(), pool=pool, prefix=prefix, block_tokens=BLOCK, chunk_tokens=48, max_batch=4)


class Worker:
    """A core with its engine and its memory. `computed` counts the tokens it has computed."""

    def __init__(
        self, model: LoadedModel, core: Callable[[BlockPool, PrefixCache], DecodeCore | PrefillCore], blocks: int
    ) -> None:
        card = model.card
        shape = (card.layers, 2, blocks, BLOCK, card.kv_heads, card.head_dim)
        self.arena = np.full(shape, np.nan, dtype=np.float32)
        pool = SpoilingPool(self.arena)
        prefix = PrefixCache(pool, block_tokens=BLOCK, fingerprint=card.fingerprint)
        self.core = core(pool, prefix)
        self.execute = Executor(GenericRunner(model, self.arena))
        self.computed = 0

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        work = self.core.plan(0.0)
        self.computed += sum(len(item.slice.token_ids) for item in work)
        self.core.complete(work, self.execute(work) if work else [], 0.0)
        self.core.check()
        return bool(work)


class Case:
    """A model and its reference."""

    def __init__(self, folder: Path) -> None:
        self.model = load(read_card(folder, "tiny"), dtype="fp32")
        self.reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def decode(self, blocks: int = 160) -> Worker:
        return Worker(self.model, decode_core, blocks)

    def prefill(self, blocks: int = 160) -> Worker:
        return Worker(self.model, prefill_core, blocks)

    def expected(self, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> list[int]:
        output = self.reference.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    root = tmp_path_factory.mktemp("models")
    return cache(lambda architecture: Case(make_tiny(architecture, root / architecture)))


@pytest.fixture(params=["llama", "gemma3"])
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


def prompt_of(tokens: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(random.Random(seed * 10_000 + tokens).choices(range(VOCAB), k=tokens))


def submit(key: str, prompt: Sequence[int], *, local: bool = True, new_tokens: int = NEW_TOKENS) -> decode.Submit:
    return decode.Submit(
        key=key,
        token_ids=tuple(prompt),
        sampling=SamplingSpec(),
        max_new_tokens=new_tokens,
        stop_token_ids=frozenset(),
        local=local,
    )


def answers(worker: Worker) -> dict[str, list[int]]:
    """Runs a decode worker until nothing is left to do; its answers by key."""
    given: dict[str, list[int]] = {}
    busy = True
    while busy:
        busy = worker.step()
        for event in worker.core.take_events():
            assert not isinstance(event, decode.Failed)
            if isinstance(event, decode.Tokens):
                given.setdefault(event.key, []).extend(event.token_ids)
    return given


def local(worker: Worker, *prompts: Sequence[int]) -> list[list[int]]:
    """Answers to prompts that are asked at once, computed by the decode worker alone."""
    for n, prompt in enumerate(prompts):
        worker.core.apply(submit(str(n), prompt), 0.0)
    given = answers(worker)
    return [given[str(n)] for n in range(len(prompts))]


def handed_over(source: Worker, target: Worker, prompt: Sequence[int]) -> tuple[list[int], int]:
    """The answer to a prompt that one worker computes and the other decodes, and how many tokens were moved."""
    asked = prefill.Submit(
        key="t",
        token_ids=tuple(prompt),
        sampling=SamplingSpec(),
        max_new_tokens=NEW_TOKENS,
        stop_token_ids=frozenset(),
    )
    source.core.apply(asked, 0.0)
    target.core.apply(submit("t", prompt, local=False), 0.0)
    target.step()
    (reserved,) = target.core.take_events()
    assert isinstance(reserved, decode.Reserved)
    while source.step():
        pass
    first = next(event for event in source.core.take_events() if isinstance(event, prefill.FirstToken))
    for position in range(reserved.skip_tokens, len(prompt)):
        there, here = source.core.pool.blocks("t")[position // BLOCK], reserved.blocks[position // BLOCK]
        target.arena[:, :, here, position % BLOCK] = source.arena[:, :, there, position % BLOCK]
    source.core.apply(prefill.Released("t"), 0.0)
    target.core.apply(decode.Received(key="t", first_token_id=first.token_id, finish=first.finish), 0.0)
    return answers(target)["t"], len(prompt) - reserved.skip_tokens


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 100, 1000])
def test_the_second_ask_computes_less_and_answers_the_same(case: Case, tokens: int) -> None:
    worker, prompt = case.decode(), prompt_of(tokens)
    expected = case.expected(prompt)
    assert local(worker, prompt) == [expected]
    before = worker.computed
    assert local(worker, prompt) == [expected]
    assert worker.computed - before == tokens - (tokens - 1) // BLOCK * BLOCK + NEW_TOKENS - 1


def test_a_conversation_goes_on_from_generated_tokens(case: Case) -> None:
    worker, prompt = case.decode(), prompt_of(40)
    for turn in range(3):
        before = worker.computed
        (answer,) = local(worker, prompt)
        assert answer == case.expected(prompt)
        assert turn == 0 or worker.computed - before < BLOCK + 2 * NEW_TOKENS
        prompt = (*prompt, *answer, 5 + turn, 6, 7)


def test_prompts_asked_at_once_share_what_is_computed_while_they_run(case: Case) -> None:
    worker, common = case.decode(), prompt_of(100)
    prompts = [(*common, *prompt_of(tokens, seed=2)) for tokens in (1, 15, 16, 17, 40, 0)]
    assert local(worker, *prompts) == [case.expected(prompt) for prompt in prompts]


def test_a_pool_too_small_for_all_prefixes_evicts_and_still_answers_right(case: Case) -> None:
    worker = case.decode(blocks=16)
    asked = random.Random(3)
    prompts = [(*prompt_of(60, seed=n), *prompt_of(tail, seed=n)) for n in range(4) for tail in (3, 30)]
    expected = {prompt: case.expected(prompt) for prompt in prompts}
    for _ in range(6):
        some = asked.sample(prompts, 3)
        assert local(worker, *some) == [expected[prompt] for prompt in some]
    assert worker.core.load().blocks.free == 16


@pytest.mark.parametrize("tokens", [1, BLOCK, BLOCK + 1, 100])
def test_a_hand_off_moves_only_what_the_receiver_lacks(case: Case, tokens: int) -> None:
    """F7."""
    source, target, prompt = case.prefill(), case.decode(), prompt_of(tokens)
    expected = case.expected(prompt)
    assert handed_over(source, target, prompt) == (expected, tokens)
    computed = source.computed
    lacking = tokens - (tokens - 1) // BLOCK * BLOCK
    assert handed_over(source, target, prompt) == (expected, lacking)
    assert source.computed - computed == lacking


def test_a_turn_after_a_hand_off_moves_neither_prompt_nor_answer_again(case: Case) -> None:
    source, target, prompt = case.prefill(), case.decode(), prompt_of(90)
    answer, _ = handed_over(source, target, prompt)
    again = (*prompt, *answer, 1, 2, 3)
    assert handed_over(source, target, again) == (case.expected(again), len(again) - 96)


def test_a_prompt_cancelled_in_mid_prefill_leaves_good_blocks(case: Case) -> None:
    worker, prompt = case.decode(), prompt_of(150)
    worker.core.apply(submit("cancelled", prompt), 0.0)
    worker.core.apply(submit("other", (*prompt[:100], 9)), 0.0)
    worker.step()
    worker.step()
    worker.core.apply(decode.Cancel("cancelled"), 0.0)
    assert answers(worker)["other"] == case.expected((*prompt[:100], 9))
    before = worker.computed
    assert local(worker, prompt) == [case.expected(prompt)]
    assert worker.computed - before < 150
