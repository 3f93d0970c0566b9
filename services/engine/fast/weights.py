"""The weights of a Llama-shaped model: merged, in the order of their use, in one stretch of memory.

A decode step reads them from the first to the last byte. Query, key and value are one matrix, gate and up another.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from services.engine.fast.config import LlamaConfig
from services.engine.native.memory import Stretch
from services.engine.native.packed import PackedMatrix


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer. Matrices (out, in) in the weights' dtype; norms and biases float32; None where the model has none."""

    input_norm: torch.Tensor
    qkv: PackedMatrix
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: PackedMatrix
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: PackedMatrix
    down: PackedMatrix


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaWeights:
    """The whole model."""

    embedding: PackedMatrix  # (vocab, hidden)
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: PackedMatrix  # (vocab, hidden); the embedding itself when tied

    @property
    def bytes(self) -> int:
        """Bytes that a decode step reads."""
        matrices = [each for layer in self.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return sum(each.nbytes for each in (*matrices, self.head))


def read_weights(folder: Path, config: LlamaConfig, dtype: torch.dtype, pair: int) -> LlamaWeights | None:
    """Reads the safetensors of `folder` into matrices packed for `pair` outputs side by side.

    None when a tensor is missing, has another shape, or has no place here: the model is not what its configuration made
    it look like.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, "pt")) for file in sorted(folder.glob("*.safetensors"))]
        tensors = {name: file.get_tensor(name) for file in files for name in file.keys()}  # noqa: SIM118  mapped, not read
        if config.tied:
            tensors.pop("lm_head.weight", None)
        reader = _Reader(tensors, config, dtype, pair)
        weights = reader.read()
    return weights if not reader.wrong and not tensors else None


class _Reader:
    """Takes tensors out of a file's table, one by one, into their places."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: LlamaConfig, dtype: torch.dtype, pair: int) -> None:
        self._tensors, self._config, self._dtype = tensors, config, dtype
        shapes = ((tensor.shape[0], tensor.shape[1]) for tensor in tensors.values() if tensor.dim() == 2)
        self._stretch = Stretch(shapes, dtype, pair)
        self.wrong: list[str] = []

    def read(self) -> LlamaWeights:
        config = self._config
        layers = tuple(self._layer(f"model.layers.{i}.") for i in range(config.layers))
        norm = self._vector("model.norm.weight", config.hidden)
        embedding = self._matrix({"model.embed_tokens.weight": config.vocab}, config.hidden)
        head = embedding if config.tied else self._matrix({"lm_head.weight": config.vocab}, config.hidden)
        return LlamaWeights(embedding=embedding, layers=layers, norm=norm, head=head)

    def _layer(self, at: str) -> LayerWeights:
        c, attention = self._config, f"{at}self_attn."
        heads = {"q_proj": c.heads * c.head_dim, "k_proj": c.kv_heads * c.head_dim, "v_proj": c.kv_heads * c.head_dim}
        return LayerWeights(
            input_norm=self._vector(f"{at}input_layernorm.weight", c.hidden),
            qkv=self._matrix({f"{attention}{name}.weight": rows for name, rows in heads.items()}, c.hidden),
            qkv_bias=self._bias({f"{attention}{name}.bias": rows for name, rows in heads.items()}),
            query_norm=self._bias({f"{attention}q_norm.weight": c.head_dim}),
            key_norm=self._bias({f"{attention}k_norm.weight": c.head_dim}),
            output=self._matrix({f"{attention}o_proj.weight": c.hidden}, c.heads * c.head_dim),
            output_bias=self._bias({f"{attention}o_proj.bias": c.hidden}),
            mlp_norm=self._vector(f"{at}post_attention_layernorm.weight", c.hidden),
            gate_up=self._matrix({f"{at}mlp.{name}_proj.weight": c.intermediate for name in ("gate", "up")}, c.hidden),
            down=self._matrix({f"{at}mlp.down_proj.weight": c.hidden}, c.intermediate),
        )

    def _matrix(self, parts: Mapping[str, int], columns: int) -> PackedMatrix:
        """The named matrices (rows, columns), one below the other."""
        merged = self._stretch.take(sum(parts.values()), columns)
        row = 0
        for name, rows in parts.items():
            part = self._take(name, (rows, columns))
            if part is not None:
                merged.write(row, part)
            row += rows
        return merged

    def _vector(self, name: str, size: int) -> torch.Tensor:
        part = self._take(name, (size,))
        return torch.empty(size) if part is None else _rounded(part, self._dtype)

    def _bias(self, parts: Mapping[str, int]) -> torch.Tensor | None:
        """The named vectors, one after the other; None when the model has none of them."""
        if not any(name in self._tensors for name in parts):
            return None
        return torch.cat([self._vector(name, size) for name, size in parts.items()])

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        tensor = self._tensors.pop(name, None)
        if tensor is not None and tuple(tensor.shape) == shape:
            return tensor
        self.wrong.append(name)
        return None


def _rounded(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 copy, with the weights' rounding."""
    return part.to(dtype).float()
