from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, make_tiny
from transformers import AutoConfig

from services.engine import model
from services.engine.card import read_card
from services.engine.errors import EngineError, ModelNotFound, UnsupportedArchitecture
from services.engine.model import load


def open_folder(folder: Path) -> None:
    load(read_card(folder, "m"), dtype="fp32")


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("falcon", "FalconForCausalLM"), ("bloom", "BloomForCausalLM"), ("gpt_oss", "GptOssForCausalLM")],
)
def test_models_that_the_paged_attention_cannot_serve_are_refused_by_name(
    architecture: str, name: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedArchitecture, match=name):
        open_folder(make_tiny(architecture, tmp_path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_causal": False}, "later tokens"),
        ({"num_kv_shared_layers": 1}, "shares KV"),
        ({"alibi": True}, "ALiBi"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["conv", "full_attention"]}, "conv"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "longrope"),
    ],
    ids=str,
)
def test_a_configuration_that_needs_more_than_paged_attention_is_refused(
    change: dict[str, object], reason: str
) -> None:
    assert reason in str(model._refusal(change))


@pytest.mark.parametrize(
    ("architecture", "layer"),
    [("gpt2", 4 * 64 * 64 + 2 * 64 * 256), ("llama", 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)],
)
def test_the_weights_that_a_step_reads_are_the_matrices_and_the_head_not_the_embedding(
    architecture: str, layer: int, tmp_path: Path
) -> None:
    loaded = load(read_card(make_tiny(architecture, tmp_path), "m"), dtype="fp32")
    assert loaded.weight_bytes == 4 * (3 * layer + VOCAB * 64)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "gpt2", "opt", "mistral", "phi", "olmo2"])
def test_a_plain_configuration_is_not_refused(model_type: str) -> None:
    assert model._refusal(AutoConfig.for_model(model_type).to_dict()) is None


def test_an_unknown_model_type_is_refused_by_name(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "nobody_knows_it", "architectures": ["NobodyForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitecture, match="NobodyForCausalLM"):
        open_folder(tmp_path)


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=str(tmp_path)):
        open_folder(tmp_path)


def test_a_layer_that_keeps_state_outside_of_attention_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that mix neighbouring rows compute the wrong thing for a flattened batch, and no config tells of them."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def mixing(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x + torch.roll(x, 1, dims=1))

    make_tiny("llama", tmp_path)
    open_folder(tmp_path)
    monkeypatch.setattr(LlamaMLP, "forward", mixing)
    with pytest.raises(UnsupportedArchitecture, match="other logits"):
        open_folder(tmp_path)


def test_bf16_weights_are_rounded_even_where_the_arithmetic_is_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "kernels", lambda: None)
    monkeypatch.setattr(model, "cpu_has_bf16", lambda: False)
    loaded = load(read_card(make_tiny("llama", tmp_path), "m"), dtype="bf16")
    assert loaded.compute_dtype is torch.float32
    for parameter in loaded.module.parameters():
        assert torch.equal(parameter, parameter.to(torch.bfloat16).to(torch.float32))


def test_on_a_cpu_with_bf16_arithmetic_the_weights_are_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "kernels", lambda: None)
    monkeypatch.setattr(model, "cpu_has_bf16", lambda: True)
    loaded = load(read_card(make_tiny("llama", tmp_path), "m"), dtype="bf16")
    assert {p.dtype for p in loaded.module.parameters()} == {torch.bfloat16}


def test_the_errors_carry_their_grpc_codes() -> None:
    assert (EngineError.code, ModelNotFound.code, UnsupportedArchitecture.code) == (
        "INTERNAL",
        "NOT_FOUND",
        "FAILED_PRECONDITION",
    )
