"""Weights in memory, for models that can be served; a refusal by name for the others.

transformers marks the models whose attention goes through its attention interface. That is necessary, not sufficient:
a model may also keep state outside of attention, share KV between layers, or ask its attention for something that ours
does not have. So what the configuration tells is checked first, and then a short text is computed in pieces over
scratch blocks and its logits compared with the model's own attention.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.logging import disable_progress_bar

from services.engine.attention import KvBatch
from services.engine.card import ModelCard
from services.engine.errors import EngineError, ModelNotFound, UnsupportedArchitecture
from services.engine.flashinfer import PagedDecode
from services.engine.interface import IMPLEMENTATION
from services.engine.native.kernels import Kernels, kernels
from services.engine.native.linear import cpu_has_bf16, stream_linears
from services.engine.native.rms import replace_rms_norms
from services.engine.plan import Slice, StepPlan, plan_step
from services.engine.pool import KvPool

log = logging.getLogger(__name__)

Dtype = Literal["fp32", "bf16"]

_TORCH_DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Rotary embeddings that change with the longest sequence of a step: a token would depend on its batch.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

_PROBE_PIECES = (7, 6, 1)  # tokens: a first chunk, a later chunk, a single token

_WINDOWED = "sliding_attention"
_LAYER_TYPES = frozenset({"full_attention", _WINDOWED})


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    card: ModelCard
    module: PreTrainedModel
    dtype: Dtype  # of the weights' values and, by convention, of the KV
    compute_dtype: torch.dtype  # of the arithmetic
    device: torch.device
    kernels: Kernels | None  # for the attention of single tokens
    weight_bytes: int  # that one decode step reads

    def batch(self, plan: StepPlan, pool: KvPool, paged: PagedDecode | None = None) -> KvBatch:
        """A step over `pool`, for `forward`."""
        return KvBatch.of(plan, pool, self.compute_dtype, self.kernels, paged)

    def forward(self, batch: KvBatch) -> torch.Tensor:
        """Float32 logits (rows, vocab) of the plan's logit rows. Writes the KV of all its tokens."""
        plan = batch.plan
        assert plan is not None
        given = (plan.token_ids, plan.positions, plan.logit_rows)
        token_ids, positions, rows = (torch.from_numpy(each).to(self.device) for each in given)
        return self.logits(token_ids, positions, rows, batch)

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, batch: KvBatch
    ) -> torch.Tensor:
        """Float32 logits (len(rows), vocab) of `rows` of a step's tokens, on the device."""
        output = self.module(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            kv_batch=batch,
        )
        return cast(torch.Tensor, output.logits)[0].float()


def load(card: ModelCard, *, dtype: Dtype = "bf16", device: str = "cpu") -> LoadedModel:
    """Load the model that `card` describes.

    On a CPU, "bf16" means weights and KV in bf16 and, with the native kernels or without bf16 instructions, arithmetic
    in float32. Raises UnsupportedArchitecture, or ModelNotFound when the folder's weights cannot be read.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    place = torch.device(device)
    found: Kernels | None = None
    compute_dtype = _TORCH_DTYPES[dtype]
    if place.type == "cpu":
        torch.set_num_threads(1)
        found = kernels()
        if dtype == "bf16" and (found or not cpu_has_bf16()):
            compute_dtype = torch.float32
    # Read in the precision asked for, which rounds the weights, and only then widened for the arithmetic.
    module = _read_module(card, _TORCH_DTYPES[dtype])  # from_pretrained leaves it in evaluation mode
    weight_bytes = sum(
        matrix.nbytes
        for each in module.modules()
        if not isinstance(each, torch.nn.Embedding)  # a step reads a row of it
        for matrix in each.parameters(recurse=False)
        if matrix.dim() == 2
    )
    if found and dtype == "bf16":
        stream_linears(module, found, torch.bfloat16)
    torch.nn.Module.to(module, place, compute_dtype)
    if found and dtype == "bf16":
        replace_rms_norms(module, found)
    module.requires_grad_(False)
    model = LoadedModel(
        card=card,
        module=module,
        dtype=dtype,
        compute_dtype=compute_dtype,
        device=place,
        kernels=found if found and card.head_dim % found.pair == 0 else None,
        weight_bytes=weight_bytes,
    )
    _probe(model)
    return model


def _read_module(card: ModelCard, dtype: torch.dtype) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(card.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedArchitecture(f"{card.architecture} is unknown to transformers: {_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedArchitecture(f"{card.architecture} is no decoder-only language model")
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    if not model_class._supports_attention_backend:
        raise UnsupportedArchitecture(
            f"{card.architecture} does not route its attention through transformers' interface"
        )
    refusal = _refusal(config.to_dict())
    if refusal:
        raise UnsupportedArchitecture(f"{card.architecture} {refusal}")
    try:
        module = model_class.from_pretrained(
            card.path, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"the weights in {card.path} cannot be loaded: {_line(error)}") from error
    return module


def _refusal(config: Mapping[str, object]) -> str | None:
    """Why a configuration cannot be served, as the end of a sentence about its architecture."""
    if config.get("is_encoder_decoder"):
        return "is an encoder-decoder"
    if config.get("is_causal") is False:
        return "attends to later tokens"
    if config.get("num_kv_shared_layers"):
        return "shares KV between layers"
    if config.get("alibi"):
        return "uses ALiBi"
    types = config.get("layer_types")
    unknown = sorted(set(types) - _LAYER_TYPES) if isinstance(types, list) else []
    if unknown:
        return f"has layers of type {', '.join(unknown)}"
    rope = sorted(_rope_types(config.get("rope_parameters")) & _BATCH_DEPENDENT_ROPE)
    return f"uses rotary embeddings of type {rope[0]}, which depend on the batch" if rope else None


def _rope_types(parameters: object) -> set[str]:
    """All rope types in a configuration's rope parameters, which may be one dict or a dict of them by layer type."""
    if not isinstance(parameters, Mapping):
        return set()
    kind = parameters.get("rope_type")
    return {str(kind)} if kind is not None else set().union(*(_rope_types(inner) for inner in parameters.values()))


@torch.inference_mode()
def _probe(model: LoadedModel) -> None:
    """Compare the paged attention with the model's own on a short text. Raises UnsupportedArchitecture."""
    name = model.card.architecture
    text = [7919 * (i + 1) % model.card.vocab for i in range(sum(_PROBE_PIECES))]
    try:
        paged = _paged_logits(model, text)
        own = _own_logits(model, text)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, TypeError, ValueError, LookupError, RuntimeError, EngineError) as error:
        raise UnsupportedArchitecture(f"{name} cannot be served: {_line(error)}") from error
    ends = [sum(_PROBE_PIECES[: i + 1]) - 1 for i in range(len(_PROBE_PIECES))]
    difference = float((paged - own[ends]).abs().max() / own.abs().max().clamp_min(1e-6))
    tolerance = 2e-3 if model.compute_dtype is torch.float32 else 0.1
    if not difference <= tolerance:  # NaN is refused too
        raise UnsupportedArchitecture(
            f"{name} computes other logits over a paged KV cache (relative difference {difference:.2g})"
        )


def _paged_logits(model: LoadedModel, text: list[int]) -> torch.Tensor:
    """Logits (pieces, vocab) of the last token of each piece, over scratch blocks in no order."""
    card, block_tokens, blocks = model.card, 4, (3, 0, 2, 1)
    shape = (card.layers, 2, len(blocks), block_tokens, card.kv_heads, card.head_dim)
    pool = KvPool(torch.zeros(shape, dtype=model.compute_dtype, device=model.device), card)
    logits = []
    start = 0
    for tokens in _PROBE_PIECES:
        piece = Slice(token_ids=text[start : start + tokens], start=start, blocks=blocks, wants_logits=True)
        plan = plan_step([piece], block_tokens=block_tokens, blocks=len(blocks), vocab=card.vocab)
        batch = model.batch(plan, pool)
        logits.append(model.forward(batch))
        _check_calls(model, batch.calls)
        start += tokens
    return torch.cat(logits)


def _own_logits(model: LoadedModel, text: list[int]) -> torch.Tensor:
    """Logits (tokens, vocab) of the model with transformers' plainest attention."""
    model.module.set_attn_implementation("eager")
    try:
        output = model.module(input_ids=torch.tensor([text], device=model.device), use_cache=False)
    finally:
        model.module.set_attn_implementation(IMPLEMENTATION)
    return cast(torch.Tensor, output.logits)[0].float()


def _check_calls(model: LoadedModel, calls: list[tuple[int, int | None]]) -> None:
    """Every layer attends once; layers with a sliding window say so, as the probe's text is shorter than windows."""
    if [layer for layer, _ in calls] != list(range(model.card.layers)):
        raise UnsupportedArchitecture(f"attention ran in layers {[layer for layer, _ in calls]}")
    config = model.module.config.to_dict()
    types = config.get("layer_types")
    if not isinstance(types, list):
        return
    for (layer, window), kind in zip(calls, types, strict=True):
        if kind == _WINDOWED and window != config.get("sliding_window"):
            raise UnsupportedArchitecture(f"layer {layer} has a sliding window that its attention is not told about")


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
