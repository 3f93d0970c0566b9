"""Which models are Llama-shaped, read from their config.json: RMS norm, rotated grouped attention, gated SiLU MLP.

Whatever is not known for certain is not Llama-shaped: the generic path serves it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

Json = Mapping[str, object]

_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_SILU = frozenset({"silu", "swish"})


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """The numbers of a Llama-shaped model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    epsilon: float
    tied: bool  # the embedding is the LM head
    frequencies: torch.Tensor  # (head_dim / 2,) float32, radians a position


def read_config(folder: Path) -> LlamaConfig | None:
    """The configuration in `folder`; None when the model is not certainly Llama-shaped."""
    fields: Json = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = _rope(fields)
    if fields.get("model_type") not in _MODEL_TYPES or fields.get("hidden_act") not in _SILU or rope is None:
        return None
    if fields.get("mlp_bias") or _slides(fields) or rope.get("partial_rotary_factor", 1) != 1:
        return None
    heads, hidden = _whole(fields, "num_attention_heads"), _whole(fields, "hidden_size")
    head_dim = _whole(fields, "head_dim") or (hidden // heads if heads else 0)
    frequencies = _frequencies(rope, head_dim) if head_dim else None
    epsilon = fields.get("rms_norm_eps")
    if frequencies is None or not isinstance(epsilon, float):
        return None
    config = LlamaConfig(
        layers=_whole(fields, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_whole(fields, "intermediate_size"),
        heads=heads,
        kv_heads=_whole(fields, "num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab=_whole(fields, "vocab_size"),
        epsilon=epsilon,
        tied=bool(fields.get("tie_word_embeddings")),
        frequencies=frequencies,
    )
    sizes = (config.layers, config.intermediate, config.vocab)
    return config if all(sizes) and heads % config.kv_heads == 0 and head_dim % 2 == 0 else None


def _whole(fields: Json, name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _slides(fields: Json) -> bool:
    """Whether any layer has a sliding window."""
    types = fields.get("layer_types")
    if isinstance(types, list):
        return any(kind != "full_attention" for kind in types)
    return bool(fields.get("sliding_window")) and fields.get("use_sliding_window") is not False


def _rope(fields: Json) -> Json | None:
    """The rotary parameters, from where transformers 5 or 4 writes them."""
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if isinstance(value, dict):
            return {"rope_theta": fields.get("rope_theta"), **value}
    return {"rope_theta": fields.get("rope_theta"), "rope_type": "default"}


def _frequencies(rope: Json, head_dim: int) -> torch.Tensor | None:
    """Rotation per position of each pair of values, as transformers' modeling_rope_utils computes it.

    default: theta^(−2i/d) (Su et al. 2021, RoFormer). llama3: low frequencies divided by `factor`, with a smooth
    passage between the two wavelengths (Llama 3.1). None: a type that is not known here.
    """
    theta, kind = rope.get("rope_theta"), rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(theta, int | float):
        return None
    plain = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if kind == "default":
        return plain
    if kind != "llama3":
        return None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    numbers = [float(value) for name in names if isinstance(value := rope.get(name), int | float)]
    if len(numbers) != len(names):
        return None
    factor, low, high, original = numbers
    wavelength = 2 * math.pi / plain
    share = (original / wavelength - low) / (high - low)
    between = (1 - share) * plain / factor + share * plain
    slow = torch.where(wavelength > original / low, plain / factor, plain)
    middle = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(middle, between, slow)
