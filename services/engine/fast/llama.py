"""The fast path's runner: the forward pass of a Llama-shaped model, written out.

x = embedding[tokens]
each layer:  x += output · attention(rotate(qkv · norm(x)))          keys and values go to the blocks on the way
             x += down · (silu(gate · norm(x)) ⊙ (up · norm(x)))
logits = head · norm(x)                                              of the rows that want them

A step in which every sequence has one new token goes through the layers in one native call: at the pace of the memory
there is no time for Python between two products, and the other threads can have the interpreter meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from services.engine.attention import KvBatch, attend
from services.engine.card import ModelCard
from services.engine.fast.config import LlamaConfig, read_config
from services.engine.fast.weights import LayerWeights, LlamaWeights, read_weights
from services.engine.native.kernels import Kernels, LayerTable, kernels
from services.engine.native.linear import Linear
from services.engine.plan import Slice, StepPlan, plan_step
from services.engine.pool import DeviceArray, KvPool

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def open_fast(card: ModelCard, *, dtype: str, device: str, array: DeviceArray) -> FastRunner | None:
    """A runner for the model in card.path over the arena `array`; None where the fast path does not serve it."""
    if device != "cpu":
        return None
    config = read_config(card.path)
    if config is None:
        return None
    found = kernels()
    if found is None or config.head_dim % found.pair:
        return None
    weights = read_weights(card.path, config, _DTYPES[dtype], found.pair)
    return None if weights is None else FastRunner(card, config, weights, found, array)


class FastRunner:
    """See Runner. Weights and KV in the dtype asked for, arithmetic in float32."""

    path: Literal["fast"] = "fast"

    def __init__(
        self, card: ModelCard, config: LlamaConfig, weights: LlamaWeights, found: Kernels, array: DeviceArray
    ) -> None:
        self._card, self._config, self._weights, self._kernels = card, config, weights, found
        self._pool = KvPool(array, card)
        self._linear = Linear(found)
        self._scale = config.head_dim**-0.5
        self._table = self._layer_table()

    @property
    def card(self) -> ModelCard:
        """See Runner."""
        return self._card

    @property
    def block_tokens(self) -> int:
        """See Runner."""
        return self._pool.block_tokens

    @property
    def weight_bytes(self) -> int:
        """See Runner."""
        return self._weights.bytes

    @torch.inference_mode()
    def run(self, slices: Sequence[Slice]) -> torch.Tensor:
        """See Runner.run."""
        if not slices:
            return torch.empty((0, self._card.vocab))
        plan = plan_step(slices, block_tokens=self.block_tokens, blocks=self._pool.blocks, vocab=self._card.vocab)
        batch = KvBatch.of(plan, self._pool, torch.float32, self._kernels)
        angles = torch.outer(torch.from_numpy(plan.positions).float(), self._config.frequencies)
        cosine, sine = angles.cos(), angles.sin()
        x = self._weights.embedding.rows(torch.from_numpy(plan.token_ids)).contiguous()
        if singles := None if plan.chunks else batch.singles:
            self._kernels.layers(
                x, self._table, cosine, sine, batch.write_slots, singles.tables, singles.starts, singles.lengths
            )
        else:
            for index, layer in enumerate(self._weights.layers):
                self._attend(x, index, layer, batch, cosine, sine)
                self._feed_forward(x, layer)
        return self._logits(x, plan)

    def _layer_table(self) -> LayerTable:
        c = self._config
        rows: list[LayerTable.Row] = [
            (w.input_norm, w.qkv, w.qkv_bias, w.query_norm, w.key_norm, w.output, w.output_bias, w.mlp_norm, w.gate_up,
             w.down, *self._pool.layer(index))
            for index, w in enumerate(self._weights.layers)
        ]  # fmt: skip
        return LayerTable(
            rows,
            dtype=self._weights.head.dtype,
            heads=c.heads,
            kv_heads=c.kv_heads,
            dim=c.head_dim,
            inner=c.intermediate,
            block_tokens=self._pool.block_tokens,
            epsilon=c.epsilon,
            scale=self._scale,
        )

    def _attend(
        self,
        x: torch.Tensor,
        index: int,
        layer: LayerWeights,
        batch: KvBatch,
        cosine: torch.Tensor,
        sine: torch.Tensor,
    ) -> None:
        c, pool = self._config, self._pool
        qkv = self._linear(self._normed(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        if layer.query_norm is not None:
            self._kernels.rms_norm(qkv, layer.query_norm, c.epsilon, qkv, groups=c.heads)
        if layer.key_norm is not None:
            keys = qkv[:, c.heads * c.head_dim :]
            self._kernels.rms_norm(keys, layer.key_norm, c.epsilon, keys, groups=c.kv_heads)
        self._kernels.place(qkv, cosine, sine, batch.write_slots, *pool.layer(index), c.heads)
        query = qkv.view(len(qkv), -1, c.head_dim)[:, : c.heads]
        attended = attend(query, batch, index, window=None, scale=self._scale, softcap=None)
        self._linear.add(x, attended.flatten(1), layer.output, layer.output_bias)

    def _feed_forward(self, x: torch.Tensor, layer: LayerWeights) -> None:
        gate_up = self._linear(self._normed(x, layer.mlp_norm), layer.gate_up)
        gated = torch.empty((len(x), layer.down.shape[1]))
        self._kernels.silu_gate(gate_up, gated)
        self._linear.add(x, gated, layer.down)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._kernels.rms_norm(x, weight, self._config.epsilon, out)
        return out

    def _logits(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        if not len(plan.logit_rows):
            return torch.empty((0, self._card.vocab))
        wanted = x[torch.from_numpy(plan.logit_rows)]
        return self._linear(self._normed(wanted, self._weights.norm), self._weights.head)
