"""The requests of one decode worker: what is known of each, where each is in its life, and how many are where.

Plain bookkeeping, O(1) for each change; the core, its memory and its turns share these values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvtransfer.states import Life
from services.decode.messages import Submit, Turns
from services.engine.sampling_spec import TokenLogprobs
from services.engine.sequence import TokenSequence
from services.schedule.policy import Change

GROWTH_TOKENS: Final = 64
"""Room reserved for new tokens at admission and when it is used up, so that a request seldom runs out of blocks."""
KEPT_CHANGES: Final = 64
"""Changes that a request keeps for its trace. Later ones are counted only."""


class Stage(Enum):
    """Where a request is; see the core's text."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    COMPUTING = "computing"
    RUNNING = "running"
    LEAVING = "leaving"
    SWAPPED = "swapped"
    RETURNING = "returning"
    DRAINING = "draining"
    ENDING = "ending"


TRANSITIONS: Final[Mapping[Stage, frozenset[Stage]]] = {
    Stage.WAITING: frozenset({Stage.RECEIVING, Stage.COMPUTING}),
    Stage.RECEIVING: frozenset({Stage.RUNNING, Stage.DRAINING}),
    Stage.COMPUTING: frozenset({Stage.RUNNING, Stage.WAITING, Stage.LEAVING}),
    Stage.RUNNING: frozenset({Stage.WAITING, Stage.LEAVING}),
    Stage.LEAVING: frozenset({Stage.SWAPPED, Stage.ENDING}),
    Stage.SWAPPED: frozenset({Stage.RETURNING}),
    Stage.RETURNING: frozenset({Stage.RUNNING, Stage.COMPUTING, Stage.ENDING}),
    Stage.DRAINING: frozenset(),
    Stage.ENDING: frozenset(),
}
"""A request that is over is forgotten, from any stage in which nobody else touches its blocks."""

RESIDENT: Final = (Stage.RUNNING, Stage.COMPUTING)
MOVING: Final = (Stage.LEAVING, Stage.RETURNING, Stage.ENDING)
ENDED: Final = (Stage.DRAINING, Stage.ENDING)


@dataclass(kw_only=True, slots=True)
class Request:
    """One request. Times are monotonic seconds of this process."""

    submit: Submit
    sequence: TokenSequence
    submitted_s: float
    local: bool  # how its KV comes about next: a hand-off is used once, afterwards it is always local
    life: Life[Stage]
    stage: Stage = Stage.WAITING  # its life's state, to look at
    generated: int = 0
    admitted_s: float = 0.0
    ready_s: float = 0.0
    cached_tokens: int = 0  # of the prompt, when it was first admitted
    chunks: int = 0
    recomputed: int = 0
    saved_tokens: int = 0  # the KV of so many is on the host
    doubted: bool = False  # its KV may be spoiled: nobody shares it
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    ran_s: float = 0.0  # when it last ran, or became ready
    waited_s: float = 0.0
    preemptions: int = 0
    lowest_level: int = 0
    swapped_bytes: int = 0
    changes: list[Change] = field(default_factory=list)
    queued_tokens: int = 0  # what it counts for in Requests.queued_tokens

    @property
    def key(self) -> str:
        """Its key."""
        return self.submit.key

    @property
    def room_tokens(self) -> int:
        """Tokens that it gets room for ahead of need."""
        return min(self.submit.max_new_tokens - self.generated, GROWTH_TOKENS)

    @property
    def whole(self) -> bool:
        """Its prompt's logits are still wanted, all of them: none of it may come from a cache."""
        return self.submit.wants_prompt_logprobs and self.generated == 0

    def note(self, change: Change) -> None:
        """Keeps what happened to it, for its trace."""
        self.lowest_level = max(self.lowest_level, change.level)
        if len(self.changes) < KEPT_CHANGES:
            self.changes.append(change)

    def turns(self) -> Turns:
        """What scheduling did with it so far."""
        return Turns(
            lowest_level=self.lowest_level,
            preemptions=self.preemptions,
            recomputed=self.recomputed,
            swapped_bytes=self.swapped_bytes,
            waited_s=self.waited_s,
            changes=tuple(self.changes),
        )


class Requests:
    """All live requests, by key and by stage, each in order of arrival there."""

    def __init__(self) -> None:
        self._by_key: dict[str, Request] = {}
        self._by_stage: dict[Stage, dict[str, Request]] = {stage: {} for stage in Stage}
        self.pinned: dict[str, Request] = {}
        """Those that had to give way, have begun to use their memory again, and have got no token for it yet."""
        self.queued_tokens = 0
        """Tokens of local requests whose KV is still to be computed, but for the newest of one that decodes."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_key.values())

    def __getitem__(self, key: str) -> Request:
        return self._by_key[key]

    def get(self, key: str) -> Request | None:
        """None when it is over, or was never here."""
        return self._by_key.get(key)

    def within(self, stage: Stage) -> dict[str, Request]:
        """Those in a stage, to look at."""
        return self._by_stage[stage]

    def count(self, *stages: Stage) -> int:
        """How many are in one of the stages."""
        return sum([len(self._by_stage[stage]) for stage in stages])

    def add(self, submit: Submit, now_s: float) -> Request:
        """A new one."""
        request = Request(
            submit=submit,
            sequence=TokenSequence(token_ids=list(submit.token_ids)),
            submitted_s=now_s,
            local=submit.local,
            life=Life(submit.key, Stage.WAITING, TRANSITIONS),
        )
        self._by_key[submit.key] = self._by_stage[Stage.WAITING][submit.key] = request
        self.recount(request)
        return request

    def move(self, request: Request, stage: Stage) -> None:
        """Advances its life."""
        before = request.stage
        request.life.advance(stage)
        request.stage = stage
        del self._by_stage[before][request.key]
        self._by_stage[stage][request.key] = request
        if stage not in RESIDENT:
            self.unpin(request)
        self.recount(request)

    def pin(self, request: Request) -> None:
        """It keeps its memory until it has got a token for it, if it had to give way before."""
        if request.recomputed or request.swapped_bytes:
            self.pinned[request.key] = request

    def unpin(self, request: Request) -> None:
        """It may give way again."""
        self.pinned.pop(request.key, None)

    def remove(self, request: Request) -> None:
        """It is over."""
        self.unpin(request)
        del self._by_key[request.key]
        del self._by_stage[request.stage][request.key]
        self.queued_tokens -= request.queued_tokens

    def recount(self, request: Request) -> None:
        """Its tokens, computed or pending, have changed."""
        computed = max(request.sequence.computed, request.saved_tokens)
        pending = len(request.sequence.token_ids) - computed if request.local and request.stage not in ENDED else 0
        tokens = pending if pending > 1 or request.stage in (Stage.WAITING, Stage.COMPUTING) else 0
        self.queued_tokens += tokens - request.queued_tokens
        request.queued_tokens = tokens
