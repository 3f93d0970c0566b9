from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import ARCHITECTURES, CONTEXT_TOKENS, VOCAB, make_tiny

from services.engine.card import read_card
from services.engine.errors import ModelNotFound, UnsupportedArchitecture

HEADS = {"llama": (2, 16), "qwen3": (2, 32), "gemma3": (2, 16), "gpt2": (4, 16), "opt": (4, 16)}


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_card_has_the_shape_of_the_model_under_all_the_names_that_configs_use(
    architecture: str, tmp_path: Path
) -> None:
    card = read_card(make_tiny(architecture, tmp_path), "tiny")
    assert (card.kv_heads, card.head_dim) == HEADS[architecture]
    assert (card.name, card.layers, card.vocab, card.context_tokens) == ("tiny", 3, VOCAB, CONTEXT_TOKENS)
    assert card.eos_token_ids == (2,)


def test_the_generation_config_decides_the_end_of_sequence_tokens(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {**PLAIN, "eos_token_id": 2})
    assert read_card(tmp_path, "m").eos_token_ids == (2,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [7, 9]})
    assert read_card(tmp_path, "m").eos_token_ids == (7, 9)


def test_heads_stand_in_for_kv_heads_and_head_dim_follows_from_the_hidden_size(tmp_path: Path) -> None:
    write(tmp_path, "config.json", PLAIN)
    card = read_card(tmp_path, "m")
    assert (card.kv_heads, card.head_dim, card.eos_token_ids) == (4, 16, ())


def test_the_fingerprint_is_that_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    one, same, other = (make_tiny("llama", tmp_path / n, seed) for n, seed in (("a", 0), ("b", 0), ("c", 1)))
    config = json.loads((same / "config.json").read_text())
    write(same, "config.json", config | {"transformers_version": "0.0", "_name_or_path": "elsewhere"})
    prints = [read_card(folder, "m").fingerprint for folder in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    write(one, "config.json", config | {"rms_norm_eps": 0.5})
    assert read_card(one, "m").fingerprint != prints[0]


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=str(tmp_path)):
        read_card(tmp_path, "m")


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_broken_config_is_no_model(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_card(tmp_path, "m")


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True})
    with pytest.raises(UnsupportedArchitecture, match="T5ForConditionalGeneration"):
        read_card(tmp_path, "m")


def test_a_config_without_layers_is_refused_and_says_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {k: v for k, v in PLAIN.items() if k != "num_hidden_layers"})
    with pytest.raises(UnsupportedArchitecture, match="num_hidden_layers"):
        read_card(tmp_path, "m")


def test_catalog_and_card_do_not_import_torch() -> None:
    code = "import sys, services.engine.catalog, services.engine.card; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
