"""The sending side: offers of KV, each pulled at most once.

Life of an offer here: `offer` promises blocks → `serve` (one pull) sends them as they are computed → the
acknowledgement releases them. An offer that is never pulled ends with its lease; `release` and `Offer.fail` end it
earlier. Whatever happens, `on_released` is called exactly once, and afterwards nothing here reads the blocks. Ids
that are over stay known for a while, so that a late or second pull is told why it fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Final

from kvtransfer.copying import CopyThread
from kvtransfer.device import Arena
from kvtransfer.equipment import Equipment
from kvtransfer.errors import (
    LayoutMismatch,
    ProtocolViolation,
    TransferAborted,
    TransferError,
    TransferExpired,
    TransferUsed,
    UnknownTransfer,
    WrongIncarnation,
)
from kvtransfer.layout import require_compatible
from kvtransfer.lease import Clock, Lease
from kvtransfer.manifest import plan
from kvtransfer.messages import Control, Open
from kvtransfer.offer import Offer
from kvtransfer.outgoing import Outgoing
from kvtransfer.staging import StagingPool
from kvtransfer.states import SendState
from kvtransfer.transport.base import Transport

TOMBSTONES: Final = 65_536
TOMBSTONE_S: Final = 600.0


class Sender:
    """One per worker. All calls belong to the event loop on which the transport was started."""

    def __init__(
        self,
        transport: Transport,
        arena: Arena,
        *,
        incarnation: str,
        clock: Clock = time.monotonic,
        checksums: bool = False,
    ) -> None:
        self._equipment = Equipment(
            transport=transport, arena=arena, staging=StagingPool(arena), copies=CopyThread("kv-gather"), clock=clock
        )
        self._incarnation = incarnation
        self._clock = clock
        self._checksums = checksums
        self._offers: dict[str, Offer] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._over: OrderedDict[str, tuple[float, TransferError]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._transfers = 0

    @property
    def offers(self) -> int:
        """Offers that are not released yet."""
        return len(self._offers)

    @property
    def staging_out(self) -> int:
        """Staging buffers that are filled, posted or draining now."""
        return self._equipment.staging.out

    @property
    def quarantined(self) -> int:
        """Staging buffers lost to operations that never resolved."""
        return self._equipment.staging.quarantined

    def offer(
        self,
        transfer_id: str,
        tokens: int,
        block_ids: Sequence[int],
        limit_s: float,
        on_released: Callable[[str], object],
    ) -> Offer:
        """Promises the KV of tokens [0, tokens), which will be computed into these blocks, for `limit_s` seconds.

        TransferUsed: the id was offered, pulled or released before. ValueError: the blocks do not hold that many
        tokens.
        """
        self._forget()
        if transfer_id in self._offers or transfer_id in self._over:
            raise TransferUsed(f"transfer {transfer_id} was used before")
        if len(block_ids) * self._equipment.arena.layout.block_tokens < tokens:
            raise ValueError(f"{len(block_ids)} blocks do not hold {tokens} tokens")

        def released(_: str) -> None:
            self._bury(offer)
            on_released(transfer_id)

        lease = Lease.grant(limit_s, self._clock)
        offer = Offer(transfer_id, tokens, tuple(block_ids), lease, self._clock, released, self._settle)
        self._offers[transfer_id] = offer
        self._watch(offer)
        if waiter := self._waiting.get(transfer_id):
            _set(waiter)
        return offer

    async def serve(self, control: Control, timeout_s: float) -> None:
        """Serves one pull to its end. A pull that comes before its offer waits for it, `timeout_s` at most.

        Raises what the pull failed with (see errors), for the receiver to be told. When the serving task is cancelled
        (the receiver's call broke), the transfer ends and drains by itself.
        """
        lease = Lease.grant(timeout_s, self._clock)
        opening = await self._opening(control, timeout_s)
        offer = await self._claim(opening, lease.remaining_s(self._clock))
        layout = self._equipment.arena.layout
        manifest = plan(layout, opening.layout.block_tokens, offer.tokens, opening.skip_tokens)
        outgoing = Outgoing(
            offer, manifest, control, self._equipment, opening.receiver_incarnation, self._tag_base(), self._checksums
        )
        run = self._spawn(self._run(outgoing))
        try:
            await asyncio.shield(run)
        except asyncio.CancelledError:
            outgoing.give_up(TransferAborted("the receiver's call ended"))
            raise

    def release(self, transfer_id: str) -> None:
        """Gives a hand-off up, whether it is known or not; a later offer or pull with that id fails. Idempotent."""
        error = TransferAborted(f"transfer {transfer_id} was released")
        if offer := self._offers.get(transfer_id):
            offer.fail(error)
        elif transfer_id not in self._over:
            self._remember(transfer_id, error)
            if waiter := self._waiting.get(transfer_id):
                _set(waiter)

    async def aclose(self) -> None:
        """Fails every offer, waits until everything has drained, and ends the copy thread. The transport stays the
        caller's.
        """
        for offer in tuple(self._offers.values()):
            offer.fail(TransferAborted("the sender shuts down"))
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._equipment.copies.close()

    async def _opening(self, control: Control, timeout_s: float) -> Open:
        try:
            async with asyncio.timeout(timeout_s):
                message = await control.receive()
        except TimeoutError:
            raise TransferExpired("the receiver did not open in time") from None
        if not isinstance(message, Open):
            raise ProtocolViolation(f"the receiver began with {message}")
        if message.sender_incarnation != self._incarnation:
            raise WrongIncarnation(f"this is incarnation {self._incarnation}, not {message.sender_incarnation}")
        require_compatible(self._equipment.arena.layout, message.layout)
        return message

    async def _claim(self, opening: Open, timeout_s: float) -> Offer:
        transfer_id = opening.transfer_id
        if transfer_id not in self._offers and transfer_id not in self._over:
            await self._wait_for_offer(transfer_id, timeout_s)
        self._forget()
        if transfer_id in self._over:
            error = self._over[transfer_id][1]
            raise type(error)(str(error))  # a fresh one: a raised error holds on to the frames it went through
        offer = self._offers.get(transfer_id)
        if offer is None:
            raise UnknownTransfer(f"transfer {transfer_id} was not offered in {timeout_s:.1f} s")
        if offer.state is not SendState.OFFERED:
            raise TransferUsed(f"transfer {transfer_id} is being pulled already")
        if not 0 <= opening.skip_tokens <= offer.tokens:
            raise LayoutMismatch(f"{opening.skip_tokens} tokens cannot be skipped of {offer.tokens}")
        offer.move(SendState.SENDING)
        return offer

    async def _wait_for_offer(self, transfer_id: str, timeout_s: float) -> None:
        if transfer_id in self._waiting:
            raise TransferUsed(f"transfer {transfer_id} is being pulled already")
        waiter = self._waiting[transfer_id] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            del self._waiting[transfer_id]

    async def _run(self, outgoing: Outgoing) -> None:
        try:
            await outgoing.run()
        finally:
            self._spawn(outgoing.drain())

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A transfer whose serving task was cancelled fails unseen, which is no news.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def _watch(self, offer: Offer) -> None:
        """Expires the offer at its lease's end; asks again when the loop's timer ran ahead of the clock."""
        if offer.lease.expired(self._clock):
            offer.fail(TransferExpired(f"the lease of transfer {offer.transfer_id} ended"))
            return
        remaining_s = offer.lease.remaining_s(self._clock)
        self._timers[offer.transfer_id] = asyncio.get_running_loop().call_later(remaining_s, self._watch, offer)

    def _settle(self, offer: Offer) -> None:
        """An offer failed: when nobody pulls it, it is over at once."""
        if offer.state is SendState.OFFERED:
            offer.move(SendState.DRAINING)
            offer.move(SendState.RELEASED)

    def _bury(self, offer: Offer) -> None:
        del self._offers[offer.transfer_id]
        if timer := self._timers.pop(offer.transfer_id, None):
            timer.cancel()
        match offer.error:
            case None:
                error: TransferError = TransferUsed(f"transfer {offer.transfer_id} was used before")
            case TransferExpired():
                error = UnknownTransfer(f"transfer {offer.transfer_id} expired")
            case _:
                error = type(offer.error)(str(offer.error))
        self._remember(offer.transfer_id, error)

    def _remember(self, transfer_id: str, error: TransferError) -> None:
        self._over[transfer_id] = (self._clock() + TOMBSTONE_S, error)
        self._forget()

    def _forget(self) -> None:
        while self._over:
            end_s, _ = next(iter(self._over.values()))
            if len(self._over) <= TOMBSTONES and end_s > self._clock():
                return
            self._over.popitem(last=False)

    def _tag_base(self) -> int:
        """Tags of this transfer: 23 bits of the incarnation, 24 of a counter, 16 for the piece. The top bit stays
        the transport's.
        """
        digest = hashlib.blake2b(self._incarnation.encode(), digest_size=3).digest()
        self._transfers += 1
        return (int.from_bytes(digest) >> 1) << 40 | (self._transfers & 0xFFFFFF) << 16


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
