"""The sending side: offers of KV, of which each part is pulled at most once.

Life of an offer here: `offer` promises blocks → `serve` (one pull for each receiver shard) sends them as they are
computed → the last acknowledgement releases them. An offer that is not pulled whole ends with its lease, which `renew`
prolongs until the first pull; `release` and
`Offer.fail` end it earlier. Whatever happens, `on_released` is called exactly once, and afterwards nothing here reads
the blocks. Ids that are over stay known for a while, so that a late or second pull is told why it fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Final

from kvtransfer.claims import Claim, Claims
from kvtransfer.coder import Coder, encodes
from kvtransfer.compression import Compression, choose
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
from kvtransfer.layout import overlap
from kvtransfer.lease import Clock, Lease
from kvtransfer.manifest import plan
from kvtransfer.messages import Control, Open
from kvtransfer.offer import Offer
from kvtransfer.outgoing import Outgoing
from kvtransfer.probe import Answering, Invitation
from kvtransfer.staging import StagingPool
from kvtransfer.transport.base import PROBE_TAGS, Transport

log = logging.getLogger(__name__)

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
        compression: Compression = "off",
        produced_bytes_per_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`compression`: how KV may leave, if the receiver allows it (see compression); what prefill produces of KV now
        is asked for "auto" alone, 0 when it is not known. A transport that reads a GPU's memory always sends plain KV.
        """
        self._equipment = Equipment(
            transport=transport,
            arena=arena,
            coder=Coder(arena),
            staging=StagingPool(arena, on_host=not transport.device_memory),
            copies=CopyThread("kv-gather"),
            clock=clock,
        )
        self._incarnation = incarnation
        self._clock = clock
        self._checksums = checksums
        self._compression: Compression = compression if encodes(arena, transport) else "off"
        if self._compression != compression:
            log.warning("KV leaves plain, not as %s: the transport reads it from the GPU's memory", compression)
        self._produced_bytes_per_s = produced_bytes_per_s
        self._offers: dict[str, Offer] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._waiting: dict[str, dict[Claim, asyncio.Future[None]]] = {}
        self._over: OrderedDict[str, tuple[float, type[TransferError], str]] = OrderedDict()  # until when, and why
        self._tasks: set[asyncio.Task[None]] = set()
        digest = hashlib.blake2b(incarnation.encode(), digest_size=6).digest()
        self._tag_prefix = int.from_bytes(digest[:3]) >> 2
        # Shards of one worker count in step: from different numbers, lest equal prefixes of two make equal tags.
        self._transfers = int.from_bytes(digest[3:])
        self._answering = asyncio.Lock()  # probes that run together would measure each other

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
        *,
        consumers: int = 1,
        lease_s: float | None = None,
    ) -> Offer:
        """Promises the KV of tokens [0, tokens), which will be computed into these blocks, for `limit_s` seconds.

        Receivers pull it until every layer and head of this shard was acknowledged `consumers` times: once, or as often
        as receiver shards hold a copy of the same heads (more tensor-parallel shards than KV heads).

        With `lease_s` the promise ends earlier unless it is pulled or renewed (`renew`) within so many seconds.
        TransferUsed: the id was offered, pulled or released before. ValueError: the blocks do not hold that many
        tokens, or consumers is not positive.
        """
        self._forget()
        if transfer_id in self._offers or transfer_id in self._over:
            raise TransferUsed(f"transfer {transfer_id} was used before")
        layout = self._equipment.arena.layout
        claims = Claims(layout.area, consumers)
        if len(block_ids) * layout.block_tokens < tokens:
            raise ValueError(f"{len(block_ids)} blocks do not hold {tokens} tokens")

        def released(_: str) -> None:
            self._bury(offer)
            on_released(transfer_id)

        limit = Lease.grant(limit_s, self._clock)
        lease = limit if lease_s is None else Lease.grant(min(lease_s, limit_s), self._clock)
        offer = Offer(transfer_id, tokens, tuple(block_ids), lease, limit, self._clock, released, claims)
        self._offers[transfer_id] = offer
        self._watch(offer)
        self._wake(transfer_id)
        return offer

    async def serve(self, control: Control, timeout_s: float) -> None:
        """Serves one pull to its end. A pull that comes before its offer waits for it, `timeout_s` at most.

        Raises what the pull failed with (see errors), for the receiver to be told. When the serving task is cancelled
        (the receiver's call broke), the transfer ends and drains by itself.
        """
        lease = Lease.grant(timeout_s, self._clock)
        opening = await self._opening(control, timeout_s)
        layout = self._equipment.arena.layout
        claim = Claim(receiver=opening.receiver_incarnation, area=overlap(layout, opening.layout))
        offer = await self._claim(opening, claim, lease.remaining_s(self._clock))
        encoding = choose(self._compression, opening.allowed, self._produced_bytes_per_s())
        manifest = plan(layout, opening.layout, offer.tokens, opening.skip_tokens, encoding)
        outgoing = Outgoing(offer, manifest, control, self._equipment, claim, self._tag_base(), self._checksums)
        run = self._spawn(self._run(outgoing))
        try:
            await asyncio.shield(run)
        except asyncio.CancelledError:
            outgoing.give_up(TransferAborted("the receiver's call ended"))
            raise

    def renew(self, transfer_id: str, lease_s: float) -> float:
        """Keeps a hand-off that a receiver is not ready to pull yet for `lease_s` seconds from now, its limit at most.

        Returns the seconds that are left of it; 0 when nothing is offered yet under this id. Idempotent. Raises what a
        pull would raise when it is over.
        """
        self._forget()
        self._require_not_over(transfer_id)
        offer = self._offers.get(transfer_id)
        return offer.renew(lease_s) if offer else 0.0

    def invite(self, receiver_incarnation: str) -> Invitation:
        """What a receiver needs for a probe of the connection between the two; `answer` takes part in it."""
        transport = self._equipment.transport
        return Invitation(
            receiver=receiver_incarnation,
            data_address=transport.address,
            transport=transport.name,
            tag_base=PROBE_TAGS | self._tag_base(),
        )

    async def answer(self, invitation: Invitation, timeout_s: float) -> None:
        """Answers one probe to its end, one at a time. PeerLost, TransferExpired, ProtocolViolation: it failed, and
        nothing else did.
        """
        lease = Lease.grant(timeout_s, self._clock)
        try:
            async with asyncio.timeout(timeout_s):
                await self._answering.acquire()
        except TimeoutError:
            raise TransferExpired("probes of other receivers took all the time") from None
        answering = Answering(self._equipment, invitation, lease)
        try:
            await answering.run(invitation.receiver)
        finally:
            self._answering.release()
            self._spawn(answering.drain())

    def release(self, transfer_id: str) -> None:
        """Gives a hand-off up, whether it is known or not; a later offer or pull with that id fails. Idempotent."""
        error = TransferAborted(f"transfer {transfer_id} was released")
        if offer := self._offers.get(transfer_id):
            offer.fail(error)
        elif transfer_id not in self._over:
            self._remember(transfer_id, TransferAborted, "was released")
            self._wake(transfer_id)

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
        return message

    async def _claim(self, opening: Open, claim: Claim, timeout_s: float) -> Offer:
        transfer_id = opening.transfer_id
        if transfer_id not in self._offers and transfer_id not in self._over:
            await self._wait_for_offer(transfer_id, claim, timeout_s)
        self._forget()
        self._require_not_over(transfer_id)
        offer = self._offers.get(transfer_id)
        if offer is None:
            raise UnknownTransfer(f"transfer {transfer_id} was not offered in {timeout_s:.1f} s")
        if not 0 <= opening.skip_tokens <= offer.tokens:
            raise LayoutMismatch(f"{opening.skip_tokens} tokens cannot be skipped of {offer.tokens}")
        offer.claim(claim)
        return offer

    def _require_not_over(self, transfer_id: str) -> None:
        if transfer_id in self._over:
            _, kind, reason = self._over[transfer_id]
            raise kind(f"transfer {transfer_id} {reason}")

    async def _wait_for_offer(self, transfer_id: str, claim: Claim, timeout_s: float) -> None:
        waiting = self._waiting.setdefault(transfer_id, {})
        if claim in waiting:
            raise TransferUsed(f"transfer {transfer_id} is being pulled already")
        waiter = waiting[claim] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            del waiting[claim]
            if not waiting:
                del self._waiting[transfer_id]

    def _wake(self, transfer_id: str) -> None:
        """Somebody offered or released it: the pulls that came before go on."""
        for waiter in self._waiting.get(transfer_id, {}).values():
            if not waiter.done():
                waiter.set_result(None)

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

    def _bury(self, offer: Offer) -> None:
        del self._offers[offer.transfer_id]
        if timer := self._timers.pop(offer.transfer_id, None):
            timer.cancel()
        match offer.error or (None if offer.claimed else offer.lost):
            case None:
                self._remember(offer.transfer_id, TransferUsed, "was used before")
            case TransferExpired():
                self._remember(offer.transfer_id, UnknownTransfer, "expired")
            case error:
                self._remember(offer.transfer_id, type(error), f"failed: {error}")

    def _remember(self, transfer_id: str, kind: type[TransferError], reason: str) -> None:
        """There are tens of thousands of them: no error objects, and the same text for all that ended alike."""
        self._over[transfer_id] = (self._clock() + TOMBSTONE_S, kind, reason)
        self._forget()

    def _forget(self) -> None:
        while self._over:
            end_s, _, _ = next(iter(self._over.values()))
            if len(self._over) <= TOMBSTONES and end_s > self._clock():
                return
            self._over.popitem(last=False)

    def _tag_base(self) -> int:
        """Tags of this transfer: 22 bits of the incarnation, 24 of a counter, 16 for the piece. The top bit stays
        the transport's, the next one is the probes'.
        """
        self._transfers += 1
        return self._tag_prefix << 40 | (self._transfers & 0xFFFFFF) << 16
