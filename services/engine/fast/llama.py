"""The fast path's runner: the forward pass of a Llama-shaped model, written out.

x = embedding[tokens]
each layer:  x += output · attention(rotate(qkv · norm(x)))          keys and values go to the blocks on the way
             x += down · (silu(gate · norm(x)) ⊙ (up · norm(x)))
logits = head · norm(x)                                              of the rows that want them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn import functional

from services.engine.attention import KvBatch, attend
from services.engine.card import ModelCard
from services.engine.fast.config import LlamaConfig, read_config
from services.engine.fast.weights import LayerWeights, LlamaWeights, read_weights
from services.engine.native.kernels import Kernels, kernels
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
    if found is None or config.head_dim % found.head_multiple:
        return None
    weights = read_weights(card.path, config, _DTYPES[dtype])
    return None if weights is None else FastRunner(card, config, weights, found, array)


class FastRunner:
    """See Runner. Weights and KV in the dtype asked for, arithmetic in float32."""

    path: Literal["fast"] = "fast"

    def __init__(
        self, card: ModelCard, config: LlamaConfig, weights: LlamaWeights, found: Kernels, array: DeviceArray
    ) -> None:
        self._card, self._config, self._weights, self._kernels = card, config, weights, found
        self._pool = KvPool(array, card)
        first = weights.layers[0]
        self._linear = Linear(found, [first.qkv, first.output, first.gate_up, first.down, weights.head])
        self._scale = config.head_dim**-0.5

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
        x = self._weights.embedding[torch.from_numpy(plan.token_ids)].float()
        for index, layer in enumerate(self._weights.layers):
            self._attend(x, index, layer, batch, cosine, sine)
            self._feed_forward(x, layer)
        return self._logits(x, plan)

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
        gate, up = self._linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=1)
        self._linear.add(x, functional.silu(gate).mul_(up), layer.down)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._kernels.rms_norm(x, weight, self._config.epsilon, out)
        return out

    def _logits(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        if not len(plan.logit_rows):
            return torch.empty((0, self._card.vocab))
        wanted = x[torch.from_numpy(plan.logit_rows)]
        return self._linear(self._normed(wanted, self._weights.norm), self._weights.head)
