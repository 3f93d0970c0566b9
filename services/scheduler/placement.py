"""Which workers serve a request: pure functions of the live workers and what is placed on them.

A policy picks one worker among candidates that can all serve the request; what makes a candidate is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.cluster.record import WorkerRecord
from services.errors import DiptychError, InvalidArgument, NotFound, Unavailable
from services.scheduler import admission


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A request, as far as placement looks at it."""

    model: str  # served name; empty means the only one
    prompt_tokens: int
    max_new_tokens: int
    avoid: frozenset[str] = frozenset()  # incarnations that failed this request already
    answers: int = 1  # of the prompt, all on one decode worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Loads:
    """Tokens that the schedulers know to be placed, by incarnation, beside what heartbeats say."""

    decode: Mapping[str, int] = field(default_factory=dict)  # placed and unfinished
    prefill: Mapping[str, int] = field(default_factory=dict)  # placed too recently to be in a heartbeat


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Who serves the request. `prefill` None: the decode worker computes the prompt, for `local_reason`."""

    decode: WorkerRecord
    prefill: WorkerRecord | None
    local_reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why nobody serves it now. `passing`: waiting for a worker may help."""

    error: DiptychError
    passing: bool


class Policy(Protocol):
    """Picks one of the candidates (at least one); `placed` are tokens placed on them, by incarnation."""

    def __call__(self, candidates: Sequence[WorkerRecord], placed: Mapping[str, int]) -> WorkerRecord:
        """The chosen one, the same for the same arguments."""
        ...


def least_tokens(candidates: Sequence[WorkerRecord], placed: Mapping[str, int]) -> WorkerRecord:
    """The worker with the fewest tokens ahead: queued on it, and placed. Ties: fewest requests, then by name."""
    return min(
        candidates,
        key=lambda worker: (
            worker.queued_tokens + placed.get(worker.incarnation, 0),
            worker.running + worker.waiting,
            worker.name,
            worker.incarnation,
        ),
    )


POLICIES: Mapping[str, Policy] = {"least-tokens": least_tokens}


def choose(
    workers: Sequence[WorkerRecord],
    wanted: Wanted,
    loads: Loads,
    *,
    local_prefill: bool,
    policy: Policy = least_tokens,
) -> Placement | Refusal:
    """Places `wanted` on live `workers`. `local_prefill`: a decode worker may compute the prompt when no other can."""
    model = resolve_model(workers, wanted.model)
    if isinstance(model, Refusal):
        return model
    decode = _choose_decode(_of(workers, "decode", model), wanted, loads, policy)
    if isinstance(decode, Refusal):
        return decode
    prefill = _choose_prefill(_of(workers, "prefill", model), decode, wanted, loads, policy)
    if isinstance(prefill, WorkerRecord):
        return Placement(decode=decode, prefill=prefill)
    if local_prefill:
        return Placement(decode=decode, prefill=None, local_reason=prefill)
    return Refusal(error=Unavailable(f"{prefill}, and local prefill is off"), passing=True)


def resolve_model(workers: Sequence[WorkerRecord], name: str) -> str | Refusal:
    """The served model that `name` means; empty means the only one."""
    served = sorted({worker.model for worker in workers if worker.role == "decode"})
    if not served:
        return Refusal(error=Unavailable("no decode worker lives"), passing=True)
    if not name and len(served) > 1:
        return Refusal(error=InvalidArgument("model", f"name one of {', '.join(served)}"), passing=False)
    if name and name not in served:
        return Refusal(error=NotFound(f"no worker serves model {name!r}, only {', '.join(served)}"), passing=False)
    return name or served[0]


def counted_tokens(worker: WorkerRecord, wanted: Wanted) -> int:
    """What the request counts for on the worker."""
    return admission.counted_tokens(
        wanted.prompt_tokens, wanted.max_new_tokens, worker.block_tokens, answers=wanted.answers
    )


def _of(workers: Sequence[WorkerRecord], role: str, model: str) -> list[WorkerRecord]:
    return [worker for worker in workers if worker.role == role and worker.model == model]


def _choose_decode(
    workers: Sequence[WorkerRecord], wanted: Wanted, loads: Loads, policy: Policy
) -> WorkerRecord | Refusal:
    tokens = wanted.prompt_tokens + wanted.max_new_tokens
    loaded = [worker for worker in workers if worker.state != "starting"]
    fitting = [worker for worker in loaded if admission.ever_fits(worker, tokens)]
    if loaded and not fitting:
        longest = max(admission.longest_tokens(worker) for worker in loaded)
        problem = (
            f"prompt and answer need {wanted.prompt_tokens} + {wanted.max_new_tokens} = {tokens} tokens, "
            f"the largest worker holds {longest}"
        )
        return Refusal(error=InvalidArgument("max_tokens", problem), passing=False)
    usable = _usable(fitting, wanted)
    if not usable:
        return Refusal(error=Unavailable(f"no decode worker is ready: {_why(workers, wanted)}"), passing=True)
    with_room = [
        worker
        for worker in usable
        if admission.has_room(
            loads.decode.get(worker.incarnation, 0),
            counted_tokens(worker, wanted),
            admission.bound_tokens(worker),
        )
    ]
    return policy(with_room or usable, loads.decode)


def _choose_prefill(
    workers: Sequence[WorkerRecord], decode: WorkerRecord, wanted: Wanted, loads: Loads, policy: Policy
) -> WorkerRecord | str:
    ready = [worker for worker in workers if worker.state == "ready"]
    if not ready:
        return "no prefill worker"
    alike = [worker for worker in ready if worker.fingerprint == decode.fingerprint]
    if not alike:
        return "no prefill worker has the same weights and precision"
    fitting = [worker for worker in alike if admission.ever_fits(worker, wanted.prompt_tokens)]
    if not fitting:
        return "the prompt fits into no prefill worker"
    usable = _usable(fitting, wanted)
    if not usable:
        return "every prefill worker has failed this request"
    return policy(usable, loads.prefill)


def _usable(workers: Sequence[WorkerRecord], wanted: Wanted) -> list[WorkerRecord]:
    return [worker for worker in workers if worker.state == "ready" and worker.incarnation not in wanted.avoid]


def _why(workers: Sequence[WorkerRecord], wanted: Wanted) -> str:
    parts = [
        f"{worker.name} " + ("has failed this request" if worker.incarnation in wanted.avoid else f"is {worker.state}")
        for worker in workers
    ]
    return ", ".join(parts[:4]) + (", …" if len(parts) > 4 else "")
