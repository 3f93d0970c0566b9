"""The shell around the prefill core: asyncio on one side, the step thread and the sender on the other.

A request's `Prefill` call waits for its FirstToken. The core's events move the offer that the receiver pulls from; the
sender says when the blocks are read no longer, which goes back to the core.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.errors import TransferAborted, TransferError, TransferExpired
from kvtransfer.offer import Offer
from kvtransfer.sender import Sender
from kvtransfer.states import SendState
from services.errors import AlreadyExists, DeadlineExceeded, DiptychError, HandOffLost
from services.prefill.messages import Admitted, Cancel, Command, Event, Failed, FirstToken, Progress, Released, Submit

log = logging.getLogger(__name__)

LEASE_S = 30.0
"""KV that nobody pulls is kept for so long, up to the hand-off limit (120 s by default), unless its receiver renews it.

A receiver that lives pulls at once, or says every 10 s that it still waits for blocks: two renewals may be lost, and
gRPC takes 9 s to notice a dead connection. A receiver that died before its pull costs a quarter of what the limit alone
would. A pull ends the matter: its stream tells of the receiver's death.
"""

FINISHED_LEASE_S = 3.0
"""KV of a request that ended with its first token is kept for so long: a receiver that comes is told how it ended.

Most often none does: the gateway has its answer from this worker and calls its decode leg off, before decode has heard
of it where decode is busy.
"""


class Submitter(Protocol):
    """Where commands go: the step thread."""

    def submit(self, command: Command) -> None:
        """Hands a command over."""


@dataclass(kw_only=True, slots=True)
class _Job:
    tokens: int
    limit_s: float
    first_token: asyncio.Future[FirstToken]
    offer: Offer | None = None
    released: bool = False  # the sender reads its blocks no longer


class PrefillService:
    """All prompts of this worker, seen from the event loop."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._jobs: dict[str, _Job] = {}
        self._thread: Submitter | None = None

    def attach(self, thread: Submitter) -> None:
        """Names the step thread; its `deliver` is ours."""
        self._thread = thread

    @property
    def outstanding(self) -> int:
        """Prompts that are computed, or whose KV a receiver has not acknowledged yet."""
        return len(self._jobs)

    async def prefill(self, submit: Submit, limit_s: float) -> FirstToken:
        """Computes one prompt. AlreadyExists: the key was used; DeadlineExceeded: not within the hand-off limit.

        A caller that goes away cancels the prompt unless it is computed.
        """
        if submit.key in self._jobs:
            raise AlreadyExists(f"transfer {submit.key} exists already")
        future: asyncio.Future[FirstToken] = asyncio.get_running_loop().create_future()
        self._jobs[submit.key] = _Job(tokens=len(submit.token_ids), limit_s=limit_s, first_token=future)
        self._submit(submit)
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"the prompt was not computed within its {limit_s:.1f} s") from None
        finally:
            if not future.done() or future.cancelled():
                self._submit(Cancel(submit.key))

    def deliver(self, events: Sequence[Event]) -> None:
        """Takes a step's events."""
        for event in events:
            job = self._jobs.get(event.key)
            if job is None:
                log.debug("transfer %s is over, its step was not: %s", event.key, event)
                continue
            match event:
                case Admitted():
                    self._offer(event, job)
                case Progress():
                    if job.offer:
                        job.offer.advance(event.computed_tokens)
                case FirstToken():
                    if job.offer:
                        job.offer.finish(event.token_id, event.finish)
                        if event.finish is not None:
                            asyncio.get_running_loop().call_later(FINISHED_LEASE_S, self._nobody_came, job.offer)
                    if not job.first_token.done():
                        job.first_token.set_result(event)
                    if job.released:
                        del self._jobs[event.key]
                case Failed():
                    self._failed(event, job)

    def _offer(self, event: Admitted, job: _Job) -> None:
        try:
            job.offer = self._sender.offer(
                event.key, job.tokens, event.blocks, job.limit_s, self._released, lease_s=LEASE_S
            )
        except TransferError as error:  # released before it was computed: nobody will pull it
            log.info("transfer %s is not offered: %s", event.key, error)
            self._fail(job, HandOffLost(str(error)))
            job.released = True
            self._submit(Released(event.key))

    def _nobody_came(self, offer: Offer) -> None:
        """For KV that has no use any more. A pull that has begun ends by itself."""
        if offer.state is SendState.OFFERED:
            offer.fail(TransferExpired("the request ended with its first token, and nobody pulled"))

    def _failed(self, event: Failed, job: _Job) -> None:
        self._fail(job, event.error)
        if not event.holds_blocks:
            self._jobs.pop(event.key, None)
        elif job.offer:
            job.offer.fail(TransferAborted(f"prefill: {event.error}"))
        else:  # no offer that would say so later
            del self._jobs[event.key]
            self._submit(Released(event.key))

    def _fail(self, job: _Job, error: DiptychError) -> None:
        if not job.first_token.done():
            job.first_token.set_exception(error)
            job.first_token.exception()  # whoever waited may be gone

    def _released(self, transfer_id: str) -> None:
        """The sender reads the blocks no longer. A prompt still being computed fails in the core, which says so."""
        self._submit(Released(transfer_id))
        job = self._jobs[transfer_id]
        job.released = True
        if job.first_token.done():
            del self._jobs[transfer_id]

    def _submit(self, command: Command) -> None:
        assert self._thread is not None, "attach comes before the first request"
        self._thread.submit(command)
