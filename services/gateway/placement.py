"""Plain values of one placement and its two legs, and the faults they can have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.engine.sampling_spec import TokenLogprobs
from services.errors import DiptychError, HandOffLost
from services.gateway.answer import FinishReason
from services.gateway.request import Sampling, Slo


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One life of a worker process."""

    name: str
    address: str
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceWish:
    """What the scheduler needs to know. `attempt` counts from 1; `answers` are to run where it is placed."""

    request_id: str
    attempt: int
    model: str
    prompt_tokens: int
    max_new_tokens: int
    tenant: str
    priority: int
    slo: Slo
    avoid: Sequence[Worker]
    answers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a request runs. `prefill` None: the decode worker computes the prompt, and the reason says why."""

    prefill: Worker | None
    decode: Worker
    transfer_id: str
    queue_s: float
    local_prefill_reason: str
    hand_off_limit_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LegWork:
    """What both legs work on. `sampling.seed` is always set; `prompt_tokens` of the tokens are the client's prompt."""

    request_id: str
    token_ids: Sequence[int]
    prompt_tokens: int
    sampling: Sampling
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    tenant: str
    priority: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillAnswer:
    """The first token, and how the prompt was computed."""

    token_id: int
    reason: FinishReason | None
    cached_tokens: int
    queue_s: float
    compute_s: float
    chunks: int
    logprobs: TokenLogprobs | None
    prompt_logprobs: Sequence[TokenLogprobs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """The hand-off as its receiver saw it."""

    bytes: int
    pieces: int
    transport: str
    duration_s: float
    exposed_s: float
    gigabytes_per_second: float
    encoding: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBegin:
    """How a decode leg came to its KV. The prefill numbers are those of a local prefill."""

    queue_s: float
    transfer: Transfer | None
    prefill_compute_s: float
    prefill_chunks: int
    cached_tokens: int
    prompt_logprobs: Sequence[TokenLogprobs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """What scheduling did with a request on its decode worker; see request.proto."""

    preemptions: int
    recomputed: int
    swapped_bytes: int
    waiting_s: float
    lowest_level: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTokens:
    """Tokens [offset, offset + len) of the leg; `begin` on the first message, `reason` and `turns` on the last.

    `logprobs`: one for each token, or none at all.
    """

    offset: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    begin: DecodeBegin | None
    reason: FinishReason | None
    turns: Turns | None = None


@dataclass(kw_only=True)
class LegReports:
    """What the legs of one placement said about themselves; None is not known (yet)."""

    prefill: PrefillAnswer | None = None
    decode: DecodeBegin | None = None
    turns: Turns | None = None


class LegFailed(Exception):
    """A leg ended without its answer. `blamed` is the worker that another placement should avoid."""

    def __init__(self, error: DiptychError, blamed: Worker) -> None:
        super().__init__(str(error))
        self.error, self.blamed = error, blamed


def blame(error: DiptychError, leg: Worker, placement: Placement) -> Worker:
    """Who to avoid. A decode leg whose hand-off was lost lost it to its prefill worker."""
    if isinstance(error, HandOffLost) and leg == placement.decode and placement.prefill is not None:
        return placement.prefill
    return leg


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveWorker:
    """A live worker as the scheduler sees it."""

    worker: Worker
    role: str  # "prefill" or "decode"
    ready: bool
    model: str
    context_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Where the time of an answer went, in seconds; None is a phase that did not happen."""

    tokenize_s: float | None = None
    queue_s: float | None = None
    prefill_queue_s: float | None = None
    prefill_compute_s: float | None = None
    prefill_chunks: int = 0
    transfer: Transfer | None = None
    first_token_s: float | None = None
    time_per_token_s: float | None = None
    total_s: float | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    local_prefill_reason: str = ""
    placements: int = 0
    turns: Turns | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Token counts of a request, or of one of its answers: the first one's has the prompt, the sum is the request's."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def of_all(cls, answers: Iterable[Usage]) -> Usage:
        """The sum."""
        every = list(answers)
        return cls(
            prompt_tokens=sum(one.prompt_tokens for one in every),
            completion_tokens=sum(one.completion_tokens for one in every),
            cached_tokens=sum(one.cached_tokens for one in every),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """How an answer ended."""

    reason: FinishReason
    usage: Usage
    phases: Phases = field(default_factory=Phases)
