"""One hand-off at the sending side: what was promised, how far it is computed, how it ends.

Life of an offer here: OFFERED (its KV is being computed) → SENDING (a receiver pulls it, or one of several shards) →
SENT (Finished was said to all) → RELEASED by the last acknowledgement. A failure, an expiry, a release or a receiver's
death leads to DRAINING, fails the other pulls (their shards are of no use alone), and leads to RELEASED when nothing
reads the blocks any more. `on_released` is called once, at RELEASED.

While it is OFFERED its lease may be shorter than its limit: a receiver that waits for memory renews it, one that died
does not. From SENDING on the limit counts alone: the pull's own stream tells of a receiver that is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtransfer.claims import Claim, Claims
from kvtransfer.errors import TransferAborted, TransferError
from kvtransfer.lease import Clock, Lease
from kvtransfer.states import SEND_TRANSITIONS, Life, SendState


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The request's first token, and an opaque reason when it ended with that token."""

    first_token_id: int
    finished: str | None


class Offer:
    """Made by Sender.offer. All calls belong to the event loop.

    `error` is what it was given up with, `lost` what the other pulls fail with after one of them did.
    """

    def __init__(
        self,
        transfer_id: str,
        tokens: int,
        block_ids: tuple[int, ...],
        lease: Lease,
        limit: Lease,
        clock: Clock,
        on_released: Callable[[str], object],
        claims: Claims,
    ) -> None:
        self.transfer_id: Final = transfer_id
        self.tokens: Final = tokens
        self.block_ids: Final = block_ids
        self.lease = lease
        self.outcome: Outcome | None = None
        self.error: TransferError | None = None
        self.lost: TransferError | None = None
        self.computed_tokens = 0
        self.computed_at_s = clock()
        self._limit = limit
        self._clock = clock
        self._on_released: Callable[[str], object] = on_released
        self._listeners: list[Callable[[], None]] = []
        self._claims = claims
        self._pulls: set[Claim] = set()
        self._told: set[Claim] = set()
        self._life = Life(f"offer {transfer_id}", SendState.OFFERED, SEND_TRANSITIONS)

    @property
    def state(self) -> SendState:
        """Where it is in its life."""
        return self._life.state

    @property
    def claimed(self) -> bool:
        """Every part of it was asked for."""
        return self._claims.made

    def advance(self, computed_tokens: int) -> None:
        """Says that the KV of tokens [0, computed_tokens) is in the blocks, for good. Never goes back. Ignored when
        over.
        """
        if not self.computed_tokens <= computed_tokens <= self.tokens:
            raise ValueError(f"computed_tokens goes from {self.computed_tokens} to {computed_tokens} of {self.tokens}")
        if computed_tokens > self.computed_tokens:
            self.computed_tokens = computed_tokens
            self.computed_at_s = self._clock()
            self._tell()

    def renew(self, lease_s: float) -> float:
        """Lets it last for `lease_s` seconds from now, its limit at most; never shortens. Returns the seconds left."""
        end_s = max(self.lease.end_s, self._clock() + lease_s)
        self.lease = Lease(end_s=min(self._limit.end_s, end_s))
        return self.lease.remaining_s(self._clock)

    def finish(self, first_token_id: int, finished: str | None = None) -> None:
        """Gives the first token. `finished` set: the request ended with it, and no more KV needs to move. Ignored
        when over.
        """
        if self.outcome is not None:
            raise ValueError(f"offer {self.transfer_id} was finished before")
        self.outcome = Outcome(first_token_id=first_token_id, finished=finished)
        self._tell()

    def fail(self, error: TransferError) -> None:
        """Gives the hand-off up; its receivers get this error. The first error stays. Ignored when over."""
        if self.error is None and self.state is not SendState.RELEASED:
            self.error = error
            self._give_up()

    def claim(self, claim: Claim) -> None:
        """A pull begins. What the offer was given up with, when it was; TransferUsed: see Claims.make."""
        if error := self.error or self.lost:
            raise type(error)(str(error))  # a fresh one: a raised error holds on to the frames it went through
        self._claims.make(claim)
        if self.state is SendState.OFFERED:
            self._move(SendState.SENDING)
        self._pulls.add(claim)

    def listen(self, listener: Callable[[], None]) -> None:
        """Has `listener` called after each change, by the one who serves a pull."""
        self._listeners.append(listener)

    def tell(self, claim: Claim) -> None:
        """Finished was said to the claim's receiver."""
        self._told.add(claim)
        if self.state is SendState.SENDING and self._claims.made and self._told >= self._pulls:
            self._move(SendState.SENT)

    def acknowledge(self, claim: Claim) -> None:
        """A pull ended well: its receiver has everything."""
        self._pulls.remove(claim)
        self._claims.acknowledge(claim)
        if self._claims.complete or (self.state is SendState.DRAINING and not self._pulls):
            self._move(SendState.RELEASED)

    def lose(self, claim: Claim, error: TransferError) -> None:
        """A pull ended badly, and nothing reads the blocks on its behalf. Ignored when it ended before."""
        if claim in self._pulls:
            self._pulls.remove(claim)
            self.lost = self.lost or TransferAborted(f"another receiver of {self.transfer_id} failed: {error}")
            self._give_up()

    def _give_up(self) -> None:
        self._tell()
        if self.state is not SendState.DRAINING:
            self._move(SendState.DRAINING)
        if not self._pulls:
            self._move(SendState.RELEASED)

    def _move(self, state: SendState) -> None:
        self._life.advance(state)
        if state is SendState.SENDING:
            self.lease = self._limit
        if state is SendState.RELEASED:
            self._listeners.clear()
            on_released, self._on_released = self._on_released, _nobody  # who is told often refers to this offer
            on_released(self.transfer_id)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()


def _nobody(transfer_id: str) -> None:
    """The owner of the blocks has been told."""
