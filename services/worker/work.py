"""What a core asks the step thread to compute, what it gets back, and the contract between the two.

Plain values; no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from kvtransfer.blocks import BlockCounts
from services.engine.plan import Slice
from services.engine.sampling_spec import History, SamplingSpec, TokenLogprobs
from services.errors import DiptychError

CommandT = TypeVar("CommandT", contravariant=True)
EventT = TypeVar("EventT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One slice of one request in a step. A token is sampled from it when `slice.wants_logits`.

    `history` is the whole sequence so far, where the sampling or the prompt's log-probabilities need it. It comes with
    the work, so that a recompute, a move or a retry samples as if nothing had happened.
    """

    key: str
    slice: Slice
    sampling: SamplingSpec
    history: History | None = None

    @classmethod
    def of(
        cls,
        key: str,
        piece: Slice,
        sampling: SamplingSpec,
        token_ids: Sequence[int],
        *,
        prompt_tokens: int,
        wants_prompt_logprobs: bool,
    ) -> Work:
        """The work for a slice of the sequence `token_ids`, which is copied only where it is needed."""
        if wants_prompt_logprobs and piece.start < prompt_tokens - 1:  # the last token of a prompt foretells none of it
            piece = replace(piece, wants_all_logits=True)
        if not (piece.wants_all_logits or (piece.wants_logits and sampling.reads_history)):
            return cls(key=key, slice=piece, sampling=sampling)
        history = History(token_ids=tuple(token_ids), prompt_tokens=prompt_tokens)
        return cls(key=key, slice=piece, sampling=sampling, history=history)


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """What a step gave for one work item.

    `prompt_logprobs` are those of the prompt's tokens that follow the slice's tokens (all but the first token of a
    prompt are somewhere among its slices' ones).
    """

    token_id: int | None = None  # None where none was wanted
    logprobs: TokenLogprobs | None = None  # of that token, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A core's numbers, for membership and metrics."""

    blocks: BlockCounts
    queued_tokens: int  # prompt tokens accepted and not computed yet
    running: int
    waiting: int
    swapped: int = 0  # of the waiting ones: their KV is on the host, or on its way there or back
    levels: tuple[int, ...] = ()  # requests by level of the schedule, the top first
    schedule: str = ""  # by name; what it is now in parentheses, if it changes
    host_blocks: int = 0  # of host memory, that requests may be placed on because running ones give way


Execute = Callable[[Sequence[Work]], Sequence[Computed | DiptychError]]
"""Computes a step; returns for each work item what it gave, or why it alone failed. Runs on the step thread."""


class StepCore(Protocol[CommandT, EventT]):
    """A worker's state machine. Only the step thread calls it; `now_s` is monotonic."""

    def apply(self, command: CommandT, now_s: float) -> None:
        """Takes one command in, between steps."""

    def plan(self, now_s: float) -> Sequence[Work]:
        """What to compute next; empty when nothing is runnable until the next command."""

    def complete(self, work: Sequence[Work], results: Sequence[Computed], now_s: float) -> None:
        """Takes in what `plan` asked for: all of it but what `fail` was called with."""

    def fail(self, work: Sequence[Work], error: Exception) -> None:
        """This part of a step could not be computed: ends the requests in it with the error."""

    def take_events(self) -> list[EventT]:
        """Events since the last call, in order."""

    def load(self) -> Load:
        """Current numbers."""

    def check(self) -> None:
        """Raises AssertionError when the block accounting does not add up."""
