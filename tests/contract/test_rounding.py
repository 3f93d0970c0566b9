"""What bf16 costs on real text: logits of the embedded model against transformers in fp32.

Its weights are bf16 to begin with, so that there only KV and arithmetic differ. With weights that are not, bf16 rounds
the weights too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.engine import runner as engine
from services.engine.card import read_card
from services.engine.catalog import resolve
from services.engine.runner import Slice, open_runner

PREFIXES = 200
LANES = 8
BLOCK_TOKENS = 16
MEDIAN_LIMIT, LARGEST_LIMIT = 0.02, 0.06

TEXT = """\
A lighthouse keeper's day began at dusk. He climbed the hundred and forty steps with a can of oil in each hand, \
trimmed the wicks, wound the clockwork that turned the lens, and wrote the hour of lighting into the book. After \
that there was little to do but watch. In summer the nights were short, and ships passed close enough for him to \
read their names through the telescope; in winter the spray froze on the glass, and every half hour he went out \
on the gallery with a scraper and a rope around his waist. Twice in nine years the lamp went out. The first time \
it was water in the oil, and he had it burning again within four minutes. The second time the chain of the \
clockwork broke, and he turned the lens by hand until morning, counting the seconds aloud, because a light that \
does not turn as the charts say is worse than no light at all. When the inspector asked him later how he had \
kept the count, he answered that he had sung hymns, and that he knew how long each of them took.
"""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A folder, the text as its tokens, and what transformers says in fp32 after each of the last PREFIXES tokens."""

    folder: Path
    token_ids: list[int]
    exact: torch.Tensor

    @property
    def begin(self) -> int:
        """Tokens before the first prefix's last one."""
        return len(self.token_ids) - PREFIXES


def read_model(folder: Path) -> Model:
    token_ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    assert PREFIXES < len(token_ids) < PREFIXES + 30
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        exact = reference(torch.tensor([token_ids]), logits_to_keep=PREFIXES).logits[0]
    return Model(folder=folder, token_ids=token_ids, exact=exact)


def perturb(source: Path, folder: Path) -> None:
    """The model with weights in fp32 of which each lies somewhere between two bf16 numbers."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights *= 1 + (torch.rand(weights.shape, generator=generator) - 0.5) / 128
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Model]]:
    embedded = resolve("smollm2", progress=print).path
    copy = tmp_path_factory.mktemp("rounding")

    @cache
    def model(weights: str) -> Model:
        if weights == "bf16":
            return read_model(embedded)
        perturb(embedded, copy)
        return read_model(copy)

    yield model
    shutil.rmtree(copy)


class Engine:
    """A runner in bf16 whose arena holds the text's blocks, and those of LANES copies of its beginnings."""

    def __init__(self, model: Model, path: engine.Path) -> None:
        card = read_card(model.folder, "smollm2")
        self._token_ids, self._begin = model.token_ids, model.begin
        self._blocks = -(-len(model.token_ids) // BLOCK_TOKENS)
        shape = (card.layers, 2, (1 + LANES) * self._blocks, BLOCK_TOKENS, card.kv_heads, card.head_dim)
        self._arena = np.full(shape, 0x7FC0, dtype=np.uint16)  # NaN: what is read without having been written shows
        self._runner = open_runner(card, dtype="bf16", device="cpu", array=self._arena, path=path)

    def prefill(self) -> torch.Tensor:
        """Logits after each prefix, the text computed at once."""
        blocks = self._lane(0)
        ids = self._token_ids
        return self._runner.run(
            [Slice(token_ids=ids, start=0, blocks=blocks, wants_logits=True, wants_all_logits=True)]
        )[self._begin :]

    def decode(self) -> torch.Tensor:
        """Logits after each prefix, one token a step: in each lane those of its part, after the prefilled beginning."""
        each = PREFIXES // LANES
        starts = [self._begin + each * lane for lane in range(LANES)]
        for lane, start in enumerate(starts):
            self._copy(start, self._lane(1 + lane))
        steps = [
            self._runner.run([self._one(start + step, self._lane(1 + lane)) for lane, start in enumerate(starts)])
            for step in range(each)
        ]
        return torch.stack(steps, dim=1).flatten(0, 1)

    def _lane(self, lane: int) -> range:
        return range(lane * self._blocks, (lane + 1) * self._blocks)

    def _one(self, at: int, blocks: range) -> Slice:
        return Slice(token_ids=self._token_ids[at : at + 1], start=at, blocks=blocks, wants_logits=True)

    def _copy(self, tokens: int, blocks: range) -> None:
        """Copies the KV of the first tokens, and of no more, into other blocks."""
        for first, (source, target) in enumerate(zip(self._lane(0), blocks, strict=True)):
            rows = slice(0, max(0, tokens - first * BLOCK_TOKENS))
            self._arena[:, :, target, rows] = self._arena[:, :, source, rows]


def relative_errors(logits: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """‖logits − exact‖ / ‖exact‖ a row, each row without its mean, which no probability depends on."""
    centred, reference = (rows.double() - rows.double().mean(dim=-1, keepdim=True) for rows in (logits, exact))
    return (centred - reference).norm(dim=-1) / reference.norm(dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "fp32"])
@pytest.mark.parametrize("path", ["fast", "generic"])
def test_bf16_stays_close_to_fp32_on_real_text_in_prefill_and_in_decode(
    models: Callable[[str], Model], weights: str, path: engine.Path
) -> None:
    model = models(weights)
    bf16 = Engine(model, path)
    found = {}
    for phase, compute in (("prefill", bf16.prefill), ("decode", bf16.decode)):
        errors = relative_errors(compute(), model.exact)
        assert len(errors) == PREFIXES
        found[phase] = (float(errors.median()), float(errors.max()))
    said = "; ".join(f"{phase}: median {median:.4f}, largest {top:.4f}" for phase, (median, top) in found.items())
    print(said)
    for median, largest in found.values():
        assert 0 < median <= MEDIAN_LIMIT and largest <= LARGEST_LIMIT, said
