"""What a core asks the step thread to compute, and the contract between the two. Plain values; no torch, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvtransfer.blocks import BlockCounts
from services.engine.plan import Slice

if TYPE_CHECKING:  # its module imports torch, a core only hands the value through
    from services.engine.sampling import SamplingSpec

CommandT = TypeVar("CommandT", contravariant=True)
EventT = TypeVar("EventT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One slice of one request in a step. A token is sampled from it when `slice.wants_logits`."""

    key: str
    slice: Slice
    sampling: SamplingSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A core's numbers, for membership and metrics."""

    blocks: BlockCounts
    queued_tokens: int  # prompt tokens accepted and not computed yet
    running: int
    waiting: int


Execute = Callable[[Sequence[Work]], list[int | None]]
"""Computes a step; returns per work item the sampled token, None where none was wanted. Runs on the step thread."""


class StepCore(Protocol[CommandT, EventT]):
    """A worker's state machine. Only the step thread calls it; `now_s` is monotonic."""

    def apply(self, command: CommandT, now_s: float) -> None:
        """Takes one command in, between steps."""

    def plan(self, now_s: float) -> Sequence[Work]:
        """What to compute next; empty when nothing is runnable until the next command."""

    def complete(self, work: Sequence[Work], tokens: Sequence[int | None], now_s: float) -> None:
        """Takes in what `plan` asked for."""

    def fail(self, work: Sequence[Work], error: Exception) -> None:
        """The step could not be computed: ends the requests in it with the error."""

    def take_events(self) -> list[EventT]:
        """Events since the last call, in order."""

    def load(self) -> Load:
        """Current numbers."""

    def check(self) -> None:
        """Raises AssertionError when the block accounting does not add up."""
