"""Between protos and the plain values of the workers' cores and of kvtransfer."""

from __future__ import annotations

from diptych.v1 import request_pb2, worker_pb2
from google.protobuf.duration_pb2 import Duration

from kvtransfer.layout import DType, KvLayout
from services.engine.sampling_spec import SamplingSpec
from services.engine.sequence import FinishReason
from services.errors import DeadlineExceeded, InvalidArgument
from services.rpc.convert import to_seconds

MAX_HAND_OFF_S = 3600.0

_FINISH: dict[FinishReason, request_pb2.FinishReason.ValueType] = {
    "stop": request_pb2.FINISH_REASON_STOP,
    "length": request_pb2.FINISH_REASON_LENGTH,
}
_FINISH_BACK: dict[int, FinishReason] = {number: name for name, number in _FINISH.items()}
_FINISH_NAMES: dict[str, FinishReason] = {name: name for name in _FINISH}
_DTYPES: dict[str, DType] = {"bf16": "bf16", "fp32": "fp32"}


def to_finish(reason: FinishReason | None) -> request_pb2.FinishReason.ValueType:
    """UNSPECIFIED for None."""
    return _FINISH[reason] if reason else request_pb2.FINISH_REASON_UNSPECIFIED


def from_finish(reason: int) -> FinishReason | None:
    """None for UNSPECIFIED."""
    return _FINISH_BACK.get(reason)


def finish_named(name: str | None) -> FinishReason | None:
    """The finish reason that a hand-off carried as an opaque name."""
    return _FINISH_NAMES[name] if name else None


def from_sampling(params: request_pb2.SamplingParams) -> SamplingSpec:
    """Raises InvalidArgument naming the field that is out of range."""
    try:
        return SamplingSpec(
            temperature=params.temperature,
            top_p=params.top_p if params.HasField("top_p") else 1.0,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=params.seed,
            repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=tuple(sorted(params.logit_bias.items())),
            logprobs=params.logprobs if params.HasField("logprobs") else None,
            prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        )
    except ValueError as error:
        raise InvalidArgument("sequence.sampling", str(error)) from None


def require_sequence(sequence: request_pb2.Sequence, vocab: int, context_tokens: int) -> None:
    """Raises InvalidArgument for a sequence that no step could compute."""
    if not sequence.token_ids:
        raise InvalidArgument("sequence.token_ids", "must not be empty")
    if (largest := max(sequence.token_ids)) >= vocab:
        raise InvalidArgument("sequence.token_ids", f"{largest} is outside the vocabulary of {vocab}")
    if sequence.prompt_tokens > len(sequence.token_ids):
        count = len(sequence.token_ids)
        raise InvalidArgument("sequence.prompt_tokens", f"{sequence.prompt_tokens} are more than the {count} token_ids")
    if (largest := max(sequence.sampling.logit_bias, default=0)) >= vocab:
        raise InvalidArgument("sequence.sampling", f"logit_bias: {largest} is outside the vocabulary of {vocab}")
    if sequence.max_new_tokens < 1:
        raise InvalidArgument("sequence.max_new_tokens", "must be at least 1")
    most = len(sequence.token_ids) + sequence.max_new_tokens
    if most > context_tokens:
        raise InvalidArgument("sequence.max_new_tokens", f"{most} tokens in all exceed the context of {context_tokens}")


def from_limit(limit: Duration) -> float:
    """Seconds that a hand-off may take. Raises DeadlineExceeded when none are left, InvalidArgument for too many."""
    seconds = to_seconds(limit)
    if seconds <= 0:
        raise DeadlineExceeded("no time is left for the hand-off")
    if seconds > MAX_HAND_OFF_S:  # KV that nobody comes for occupies memory until then
        raise InvalidArgument("hand_off_limit", f"{seconds:g} s are more than {MAX_HAND_OFF_S:g}")
    return seconds


def to_layout(layout: KvLayout) -> worker_pb2.KvLayout:
    """The proto of a layout."""
    return worker_pb2.KvLayout(
        model=layout.model,
        dtype=layout.dtype,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        layer_begin=layout.layer_begin,
        layer_end=layout.layer_end,
        head_begin=layout.head_begin,
        head_end=layout.head_end,
    )


def from_layout(layout: worker_pb2.KvLayout) -> KvLayout:
    """Raises InvalidArgument for what is no layout at all; whether it fits is kvtransfer's to say."""
    if layout.dtype not in _DTYPES:
        raise InvalidArgument("layout.dtype", f"must be one of {', '.join(_DTYPES)}, got {layout.dtype!r}")
    try:
        return KvLayout(
            model=layout.model,
            dtype=_DTYPES[layout.dtype],
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            block_tokens=layout.block_tokens,
            layer_begin=layout.layer_begin,
            layer_end=layout.layer_end,
            head_begin=layout.head_begin,
            head_end=layout.head_end,
        )
    except ValueError as error:
        raise InvalidArgument("layout", str(error)) from None
