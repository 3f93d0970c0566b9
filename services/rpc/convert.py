"""Small converters between proto types and plain values."""

from __future__ import annotations

from diptych.v1 import request_pb2
from google.protobuf.duration_pb2 import Duration

from services.engine.sampling_spec import TokenLogprobs


def to_duration(seconds: float) -> Duration:
    """A proto Duration; negative values (clock skew of a remaining time) become zero."""
    duration = Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration


def to_seconds(duration: Duration) -> float:
    """Seconds of a proto Duration; an absent one is zero."""
    return duration.ToNanoseconds() / 1e9


def to_logprobs(logprobs: TokenLogprobs | None) -> request_pb2.TokenLogprobs:
    """The proto of a token's log-probabilities; empty for None."""
    if logprobs is None:
        return request_pb2.TokenLogprobs()
    return request_pb2.TokenLogprobs(
        logprob=logprobs.logprob, top_token_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs
    )


def from_logprobs(logprobs: request_pb2.TokenLogprobs) -> TokenLogprobs:
    """A token's log-probabilities."""
    return TokenLogprobs(logprobs.logprob, tuple(logprobs.top_token_ids), tuple(logprobs.top_logprobs))
