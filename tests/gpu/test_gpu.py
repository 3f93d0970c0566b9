"""The same paths with CUDA: the arena's copies against their NumPy twin, and tokens against `generate`.

Skipped where there is no CUDA device; run on one with `pytest tests/gpu` (needs the `gpu` extra).
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import flashinfer_twin
import numpy as np
import pytest
import torch
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from kvtransfer.device import Arena, copy_to_host
from kvtransfer.layout import KvLayout
from kvtransfer.manifest import plan
from services.engine.card import read_card
from services.engine.flashinfer import PagedDecode, library
from services.engine.generic import GenericRunner
from services.engine.model import load
from services.engine.plan import Singles
from services.engine.pool import layout_of
from services.engine.sequence import TokenSequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCK_TOKENS, BLOCKS, TOKENS = 16, 24, 100
LAYOUT = KvLayout(model="m", dtype="bf16", layers=3, kv_heads=2, head_dim=16, block_tokens=BLOCK_TOKENS)


@pytest.mark.parametrize("tokens", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, TOKENS])
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("head_dim", [1, 2, 4, 16])
def test_gather_and_scatter_do_on_the_gpu_what_they_do_on_the_cpu(tokens: int, on_host: bool, head_dim: int) -> None:
    """From two heads to one of them, in blocks of another size; by units of 2, 4, 8 and 16 bytes."""
    import cupy

    whole = dataclasses.replace(LAYOUT, head_dim=head_dim)
    shard = dataclasses.replace(whole, block_tokens=24, layer_begin=1, head_begin=1)
    content = np.random.default_rng(5).integers(0, 2**16, (3, 2, BLOCKS, BLOCK_TOKENS, 2, head_dim), dtype=np.uint16)
    source, target = random.Random(1).sample(range(BLOCKS), 7), random.Random(2).sample(range(BLOCKS), 7)
    arenas = {device: (Arena(whole, BLOCKS, device), Arena(shard, BLOCKS, device)) for device in ("cpu", "cuda:0")}
    for device, (sender, receiver) in arenas.items():
        sender.array[...] = content if device == "cpu" else cupy.asarray(content)
        for piece in plan(whole, shard, tokens).pieces:
            buffer = sender.staging(piece.bytes, on_host=on_host)
            sender.gather(piece, source, buffer)
            receiver.scatter(piece, target, buffer)
    twin, device = arenas["cpu"][1].array, arenas["cuda:0"][1].array
    assert copy_to_host(device.reshape(-1).view(np.uint8)) == twin.tobytes()


def test_the_copies_come_after_what_torch_was_told_before() -> None:
    """Torch writes the arena through DLPack, slowly, and nobody waits for it before the gather."""
    arena = Arena(LAYOUT, BLOCKS, "cuda:0")
    tensor = torch.from_dlpack(arena.array).view(torch.int16)
    (piece,) = plan(LAYOUT, LAYOUT, BLOCKS * BLOCK_TOKENS).pieces[-1:]
    buffer = arena.staging(piece.bytes)
    slow = torch.randn(4096, 4096, device="cuda:0")
    for value in (1, 2, 3):
        for _ in range(20):
            slow = slow @ slow / slow.norm()
        tensor.fill_(value)
        arena.gather(piece, range(BLOCKS), buffer)
        assert copy_to_host(buffer) == np.full(piece.bytes // 2, value, np.uint16).tobytes()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_greedy_tokens_on_the_gpu_equal_generate(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny(architecture, tmp_path / architecture)
    card = read_card(folder, architecture)
    layout = layout_of(card, "fp32", BLOCK_TOKENS)
    runner = GenericRunner(load(card, dtype="fp32", device="cuda:0"), Arena(layout, BLOCKS, "cuda:0").array)
    prompt = [5 + i % 300 for i in range(TOKENS)]
    sequence = TokenSequence(token_ids=list(prompt))
    sequence.add_blocks(random.Random(3).sample(range(BLOCKS), 8))
    while len(sequence.token_ids) < TOKENS + 12:  # chunks of 37, then single tokens: these are replays of a graph
        piece = sequence.next_slice(37)
        logits = runner.run([piece])
        sequence.advance(len(piece.token_ids))
        if piece.wants_logits:
            sequence.append(int(logits[0].argmax()))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda:0")
    expected = reference.generate(
        torch.tensor([prompt], device="cuda:0"), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert sequence.token_ids == expected[0].tolist()


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_batch_of_decode_steps_in_graphs_equals_each_sequence_alone(tmp_path: Path, rows: int) -> None:
    folder = make_tiny("qwen3", tmp_path / "qwen3")
    card = read_card(folder, "qwen3")
    shape = (card.layers, 2, 64, BLOCK_TOKENS, card.kv_heads, card.head_dim)
    model = load(card, dtype="fp32", device="cuda:0")
    import cupy

    def decode(prompts: list[list[int]]) -> list[list[int]]:
        runner = GenericRunner(model, cupy.zeros(shape, cupy.float32))
        sequences = [TokenSequence(token_ids=list(prompt)) for prompt in prompts]
        for i, sequence in enumerate(sequences):
            sequence.add_blocks(range(8 * i, 8 * i + 8))
        while len(sequences[0].token_ids) < len(prompts[0]) + 10:
            pieces = [sequence.next_slice(1000) for sequence in sequences]
            tokens = runner.run(pieces).argmax(dim=-1).tolist()
            for sequence, piece, token in zip(sequences, pieces, tokens, strict=True):
                sequence.advance(len(piece.token_ids))
                sequence.append(token)
        return [sequence.token_ids for sequence in sequences]

    prompts = [[5 + (7 * i + j) % 300 for j in range(20 + 9 * i)] for i in range(rows)]
    assert decode(prompts) == [decode([prompt])[0] for prompt in prompts]


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (24, 0.0), (0, 5.0)])
def test_flashinfer_attends_like_its_twin(window: int, softcap: float) -> None:
    if library() is None:
        pytest.skip("needs FlashInfer, too")
    device, dtype = torch.device("cuda:0"), torch.bfloat16
    keys, values = torch.randn(2, 12, BLOCK_TOKENS, 2, 64, device=device).to(dtype)
    query = torch.randn(3, 6, 64, device=device).to(dtype)
    lengths, tables, starts = [1, 17, 90], [3, 9, 1, 0, 2, 4, 5, 6, 7], [0, 1, 3]
    singles = Singles(rows=np.arange(3), lengths=np.array(lengths), tables=np.array(tables), starts=np.array(starts))
    got = []
    for kernel in (library(), flashinfer_twin):
        assert kernel is not None
        paged = PagedDecode(kernel, BLOCK_TOKENS, device)
        paged.begin(singles)
        got.append(paged.attend(query, keys, values, window=window, scale=0.125, softcap=softcap))
    torch.testing.assert_close(got[0], got[1], rtol=2e-2, atol=2e-2)
