"""The contract of `Runner`: whatever the batch, the tokens are those of transformers' own `generate`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import flashinfer_twin
import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, VOCAB, make_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.engine.card import read_card
from services.engine.catalog import resolve
from services.engine.errors import EngineError, InvalidSlice, UnsupportedArchitecture
from services.engine.fast.config import read_config
from services.engine.generic import GenericRunner
from services.engine.model import load
from services.engine.native.kernels import kernels
from services.engine.runner import Dtype, Runner, Slice, open_runner
from services.engine.sequence import TokenSequence

BLOCK_TOKENS = 16
BLOCKS = 96
NEW_TOKENS = 12
PROMPT_TOKENS = (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 100)

MakeRunner = Callable[[np.ndarray], Runner]

# gemma2 (softcap) and mistral (window without layer types) are served by the same code paths as the others and more.
MODELS = (*ARCHITECTURES, "gemma2", "mistral")
FAST_MODELS = ("llama", "llama_biased", "llama_scaled", "qwen2", "qwen3")
GPU_TWINS = ("graphs", "paged", "paged graphs")
"""The GPU's steps on a CPU: a graph's fixed tensors without a graph, FlashInfer's tables with a twin of it."""
KINDS = ("generic", "fast", "generic without kernels", *GPU_TWINS)
CASES = [
    *(("generic", model) for model in MODELS),
    *(("generic without kernels", model) for model in ("llama", "gemma3")),
    *(("fast", model) for model in FAST_MODELS),
    *((twin, model) for twin in GPU_TWINS for model in ("llama", "gemma2")),
]


def make_runner(kind: str, folder: Path, dtype: Dtype) -> MakeRunner:
    """Loads the weights once for a runner that keeps them apart from its arena."""
    card = read_card(folder, "tiny")
    if kind == "fast":
        assert kernels() is not None, "the fast path needs a C++ compiler"
        return lambda arena: open_runner(card, dtype=dtype, device="cpu", array=arena, path="fast")
    model = load(card, dtype=dtype)
    if kind == "generic":
        return lambda arena: GenericRunner(model, arena)
    bare = dataclasses.replace(model, kernels=None)
    capture = (lambda compute: compute) if "graphs" in kind else None
    paged = flashinfer_twin if "paged" in kind else None
    return lambda arena: GenericRunner(bare, arena, capture=capture, paged=paged)


class Case:
    """A model, runners over spoiled arenas, and the reference model."""

    def __init__(self, folder: Path, kind: str, dtype: Dtype = "fp32") -> None:
        self.card, self.dtype = read_card(folder, "tiny"), dtype
        self.make = make_runner(kind, folder, dtype)
        self.reference = reference(folder)

    def arena(self, blocks: int = BLOCKS) -> np.ndarray:
        """An arena full of NaN: a slot that is read without having been written cannot go unnoticed."""
        card = self.card
        shape = (card.layers, 2, blocks, BLOCK_TOKENS, card.kv_heads, card.head_dim)
        if self.dtype == "fp32":
            return np.full(shape, np.nan, dtype=np.float32)
        return np.full(shape, 0x7FC0, dtype=np.uint16)

    def runner(self) -> Runner:
        return self.make(self.arena())

    def expected(self, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> list[int]:
        """The reference's greedy continuation, past end-of-sequence tokens."""
        output = self.reference.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        return output[0, len(prompt) :].tolist()


@cache
def reference(folder: Path) -> PreTrainedModel:
    # sdpa knows no softcap, and says so.
    softcap = "gemma2" in folder.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager" if softcap else "sdpa"
    )
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    @cache
    def folder(architecture: str) -> Path:
        return make_tiny(architecture, root / architecture)

    return folder


@pytest.fixture(scope="module")
def cases(folders: Callable[[str], Path]) -> Callable[[str, str], Case]:
    return cache(lambda kind, architecture: Case(folders(architecture), kind))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, cases: Callable[[str, str], Case]) -> Case:
    return cases(*request.param)


@pytest.fixture
def llama(kind: str, cases: Callable[[str, str], Case]) -> Case:
    return cases(kind, "llama")


def prompt_of(tokens: int, seed: int = 1) -> list[int]:
    return random.Random(seed * 1000 + tokens).choices(range(VOCAB), k=tokens)


def decode(
    runner: Runner, prompts: Sequence[Sequence[int]], *, chunk: Callable[[int], int], new_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """Greedy continuation of all prompts together, over shuffled blocks. `chunk(step)` limits a slice's tokens."""
    free = list(range(BLOCKS))
    random.Random(7).shuffle(free)
    sequences = [TokenSequence(token_ids=list(prompt)) for prompt in prompts]
    for sequence in sequences:
        missing = sequence.blocks_missing(runner.block_tokens, room_tokens=new_tokens)
        sequence.add_blocks(free.pop() for _ in range(missing))
    step = 0
    while True:
        running = [s for s, p in zip(sequences, prompts, strict=True) if len(s.token_ids) < len(p) + new_tokens]
        if not running:
            return [s.token_ids[len(p) :] for s, p in zip(sequences, prompts, strict=True)]
        slices = [s.next_slice(chunk(step + i)) for i, s in enumerate(running)]
        logits = runner.run(slices)
        tokens = iter(logits.argmax(dim=-1).tolist())
        for sequence, part in zip(running, slices, strict=True):
            sequence.advance(len(part.token_ids))
            if part.wants_logits:
                sequence.append(next(tokens))
        step += 1


@pytest.mark.parametrize("tokens", PROMPT_TOKENS)
def test_one_prompt_alone_gives_the_tokens_of_generate(case: Case, tokens: int) -> None:
    prompt = prompt_of(tokens)
    expected = case.expected(prompt)
    assert len(set(expected)) > 2, "a constant text would prove little"
    assert decode(case.runner(), [prompt], chunk=lambda _: tokens) == [expected]


def test_prompts_of_all_sizes_together_give_the_tokens_of_generate(case: Case) -> None:
    prompts = [prompt_of(tokens) for tokens in PROMPT_TOKENS]
    assert decode(case.runner(), prompts, chunk=lambda _: 1000) == [case.expected(p) for p in prompts]


def test_uneven_chunks_mixed_with_single_tokens_give_the_tokens_of_generate(case: Case) -> None:
    """Chunks of 1 to 37 tokens: early prompts already decode while late ones are still computed."""
    prompts = [prompt_of(tokens, seed=2) for tokens in (100, 1, 17, 90, 33, 16)]
    sizes = (7, 1, 37, 16, 5, 11)
    assert decode(case.runner(), prompts, chunk=lambda step: sizes[step % len(sizes)]) == [
        case.expected(p) for p in prompts
    ]


def test_logits_of_the_wanted_slices_equal_the_references(case: Case) -> None:
    prompts = [prompt_of(tokens, seed=3) for tokens in (20, 3, 41)]
    wants = (True, False, True)
    logits = case.runner().run(
        [
            Slice(token_ids=p, start=0, blocks=range(4 * i, 4 * i + 4), wants_logits=w)
            for i, (p, w) in enumerate(zip(prompts, wants, strict=True))
        ]
    )
    expected = [case.reference(torch.tensor([p])).logits[0, -1] for p in (prompts[0], prompts[2])]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, torch.stack(expected).detach(), rtol=1e-4, atol=1e-4)


def test_logits_of_whole_slices_equal_the_references_beside_slices_that_want_one_or_none(case: Case) -> None:
    """A prompt in two chunks, of which all logits are wanted; then what foretells each of its tokens is known."""
    prompt, others = prompt_of(41, seed=4), [prompt_of(20, seed=4), prompt_of(3, seed=4)]
    runner, found = case.runner(), []
    for start, end in ((0, 23), (23, 41)):
        whole = Slice(
            token_ids=prompt[start:end],
            start=start,
            blocks=range(4),
            wants_logits=end == len(prompt),
            wants_all_logits=True,
        )
        one = Slice(token_ids=others[0], start=0, blocks=range(4, 8), wants_logits=True)
        none = Slice(token_ids=others[1], start=0, blocks=[8], wants_logits=False)
        logits = runner.run([none, whole, one])
        assert len(logits) == end - start + 1
        found.append(logits[:-1])
        torch.testing.assert_close(
            logits[-1], case.reference(torch.tensor([others[0]])).logits[0, -1].detach(), rtol=1e-4, atol=1e-4
        )
    expected = case.reference(torch.tensor([prompt])).logits[0].detach()
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)


def test_the_blocks_hold_the_references_keys_token_by_token(llama: Case) -> None:
    """What another worker is sent is what is in the arena: right place, right layout, nothing else touched."""
    prompt, blocks = prompt_of(BLOCK_TOKENS + 3), [9, 4]
    arena = llama.arena()
    llama.make(arena).run([Slice(token_ids=prompt, start=0, blocks=blocks, wants_logits=False)])
    cache_ = llama.reference(torch.tensor([prompt]), use_cache=True).past_key_values
    for layer in range(llama.card.layers):
        for which, tensor in enumerate((cache_.layers[layer].keys, cache_.layers[layer].values)):
            expected = tensor[0].transpose(0, 1).detach().numpy()
            written = np.concatenate([arena[layer, which, block] for block in blocks])[: len(prompt)]
            np.testing.assert_allclose(written, expected, rtol=1e-4, atol=1e-4)
    assert np.count_nonzero(~np.isnan(arena).all(axis=(0, 1, 4, 5))) == len(prompt)


def test_a_sequence_goes_on_from_blocks_that_another_runner_wrote(llama: Case) -> None:
    prompt = prompt_of(2 * BLOCK_TOKENS + 5)
    source, target = llama.arena(), llama.arena()
    there, here = [40, 2, 17], [3, 60, 21]
    first = llama.make(source).run([Slice(token_ids=prompt, start=0, blocks=there, wants_logits=True)])
    target[:, :, here] = source[:, :, there]
    token = int(first.argmax())
    after = llama.make(target).run([Slice(token_ids=[token], start=len(prompt), blocks=here, wants_logits=True)])
    assert [token, int(after.argmax())] == llama.expected(prompt, 2)


def test_no_slices_and_no_wanted_logits_give_no_rows(llama: Case) -> None:
    runner = llama.runner()
    assert tuple(runner.run([]).shape) == (0, VOCAB)
    silent = Slice(token_ids=[1, 2], start=0, blocks=[0], wants_logits=False)
    assert tuple(runner.run([silent]).shape) == (0, VOCAB)


def test_a_bad_slice_is_refused_before_anything_is_written(llama: Case) -> None:
    good = Slice(token_ids=[1, 2], start=0, blocks=[0], wants_logits=True)
    bad = (
        Slice(token_ids=[VOCAB], start=0, blocks=[1], wants_logits=True),
        Slice(token_ids=[-1], start=0, blocks=[1], wants_logits=True),
        Slice(token_ids=[1], start=0, blocks=[BLOCKS], wants_logits=True),
        Slice(token_ids=[1], start=BLOCK_TOKENS, blocks=[1], wants_logits=True),
        Slice(token_ids=[], start=0, blocks=[1], wants_logits=True),
        Slice(token_ids=[3], start=1, blocks=[0], wants_logits=True),
    )
    for slice_ in bad:
        arena = llama.arena()
        with pytest.raises(InvalidSlice):
            llama.make(arena).run([good, slice_])
        assert np.isnan(arena).all()


def test_an_arena_of_another_shape_or_dtype_is_refused(llama: Case) -> None:
    arena = llama.arena()
    for wrong in (arena[:-1].copy(), arena[..., :-1].copy(), arena.astype(np.float64)):
        with pytest.raises(EngineError):
            llama.make(wrong)


@pytest.mark.parametrize(
    ("kind", "architecture"), [("generic", "llama"), ("generic", "gemma3"), ("fast", "llama"), ("fast", "qwen3")]
)
def test_bf16_logits_stay_within_rounding_of_fp32_and_do_not_depend_on_chunks(
    kind: str, architecture: str, folders: Callable[[str], Path]
) -> None:
    case = Case(folders(architecture), kind, dtype="bf16")
    prompt = prompt_of(60)
    blocks = [5, 1, 8, 2]
    whole = case.runner().run([Slice(token_ids=prompt, start=0, blocks=blocks, wants_logits=True)])
    runner = case.runner()
    runner.run([Slice(token_ids=prompt[:23], start=0, blocks=blocks, wants_logits=False)])
    pieces = runner.run([Slice(token_ids=prompt[23:], start=23, blocks=blocks, wants_logits=True)])
    exact = case.reference(torch.tensor([prompt])).logits[0, -1].detach()
    scale = float(exact.abs().max())
    assert float((whole - pieces).abs().max()) / scale < 0.01
    difference = float((whole[0] - exact).abs().max()) / scale
    assert 0 < difference < 0.15


@pytest.fixture(scope="module", params=["generic", "fast"])
def smollm2(request: pytest.FixtureRequest) -> Case:
    return Case(resolve("smollm2", progress=lambda _: None).path, request.param)


def real_prompt(tokens: int) -> list[int]:
    """Tokens of the embedded model's vocabulary, most of them plain words."""
    return [1, *random.Random(tokens).choices(range(300, 20_000), k=tokens - 1)]


@pytest.mark.parametrize(
    "sizes", [pytest.param((1, 15, 17)), pytest.param((16, 100, 33), marks=pytest.mark.slow)], ids=str
)
def test_the_embedded_model_gives_the_tokens_of_generate(smollm2: Case, sizes: tuple[int, ...]) -> None:
    prompts = [real_prompt(tokens) for tokens in sizes]
    expected = [smollm2.expected(p, 5) for p in prompts]
    assert decode(smollm2.runner(), prompts, chunk=lambda step: (11, 4, 40)[step % 3], new_tokens=5) == expected


def test_what_is_not_certainly_llama_shaped_is_left_to_the_generic_path(folders: Callable[[str], Path]) -> None:
    for architecture in (*MODELS, *FAST_MODELS):
        config = read_config(folders(architecture))
        assert (config is not None) == (architecture in FAST_MODELS), architecture
    card = read_card(folders("gemma3"), "tiny")
    arena = np.zeros((card.layers, 2, 2, BLOCK_TOKENS, card.kv_heads, card.head_dim), np.float32)
    assert open_runner(card, dtype="fp32", device="cpu", array=arena).path == "generic"
    with pytest.raises(UnsupportedArchitecture, match="fast path"):
        open_runner(card, dtype="fp32", device="cpu", array=arena, path="fast")
