"""Small converters between proto types and plain values."""

from __future__ import annotations

from diptych.v1 import request_pb2, worker_pb2
from google.protobuf.duration_pb2 import Duration

from services.cluster.record import Link
from services.engine.sampling_spec import TokenLogprobs
from services.latency import Latency, PrefillFit, StepFit


def to_duration(seconds: float) -> Duration:
    """A proto Duration; negative values (clock skew of a remaining time) become zero."""
    duration = Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration


def to_seconds(duration: Duration) -> float:
    """Seconds of a proto Duration; an absent one is zero."""
    return duration.ToNanoseconds() / 1e9


def to_ref(*, name: str, address: str, incarnation: str) -> worker_pb2.WorkerRef:
    """The proto of one life of a worker."""
    return worker_pb2.WorkerRef(name=name, address=address, incarnation=incarnation)


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


def to_prefill_fit(fit: PrefillFit | None) -> worker_pb2.PrefillFit | None:
    """The proto of a fit; absent for None."""
    if fit is None:
        return None
    return worker_pb2.PrefillFit(
        a_s=fit.a_s, b_s=fit.b_s, c_s=fit.c_s, chunk_tokens=fit.chunk_tokens, error=fit.error, steps=fit.steps
    )


def to_step_fit(fit: StepFit | None) -> worker_pb2.StepFit | None:
    """The proto of a fit; absent for None."""
    if fit is None:
        return None
    return worker_pb2.StepFit(a_s=fit.a_s, b_s=fit.b_s, c_s=fit.c_s, error=fit.error, steps=fit.steps)


def to_link(link: Link) -> worker_pb2.Link:
    """The proto of a link."""
    return worker_pb2.Link(
        peer=link.peer,
        peer_incarnation=link.peer_incarnation,
        transport=link.transport,
        lanes=link.lanes,
        bytes_per_s=link.bytes_per_s,
        round_trip=to_duration(link.round_trip_s),
        error=link.error,
        warning=link.warning,
    )


def latency_of(view: worker_pb2.WorkerView) -> Latency:
    """What a listed worker says of its speed. ValueError for coefficients that no worker has."""
    prefill, step = view.prefill_fit, view.step_fit
    return Latency(
        prefill=PrefillFit(
            a_s=prefill.a_s,
            b_s=prefill.b_s,
            c_s=prefill.c_s,
            chunk_tokens=prefill.chunk_tokens,
            error=prefill.error,
            steps=prefill.steps,
        )
        if view.HasField("prefill_fit")
        else None,
        step=StepFit(a_s=step.a_s, b_s=step.b_s, c_s=step.c_s, error=step.error, steps=step.steps)
        if view.HasField("step_fit")
        else None,
    )
