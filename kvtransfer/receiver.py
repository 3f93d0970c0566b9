"""The receiving side: pulls hand-offs into blocks.

Life of a pull here: see incoming. `pull` returns or raises as soon as the blocks are settled; what the wire may still
write (staging buffers, never blocks) drains in the background, and `drained` waits for that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence

from kvtransfer.coder import Coder
from kvtransfer.copying import CopyThread
from kvtransfer.device import Arena
from kvtransfer.equipment import Equipment
from kvtransfer.errors import LayoutMismatch, TransferAborted
from kvtransfer.incoming import Incoming
from kvtransfer.layout import Area
from kvtransfer.lease import Clock, Lease
from kvtransfer.messages import Control, Open
from kvtransfer.probe import Invitation, Measured, Probe
from kvtransfer.received import Received
from kvtransfer.staging import StagingPool
from kvtransfer.transport.base import Transport


class Receiver:
    """One per worker. All calls belong to the event loop on which the transport was started."""

    def __init__(self, transport: Transport, arena: Arena, *, clock: Clock = time.monotonic) -> None:
        self._equipment = Equipment(
            transport=transport,
            arena=arena,
            coder=Coder(arena),
            staging=StagingPool(arena, on_host=not transport.device_memory),
            copies=CopyThread("kv-scatter"),
            clock=clock,
        )
        self._clock = clock
        self._pulls: set[Incoming] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def staging_out(self) -> int:
        """Staging buffers that are posted or draining now."""
        return self._equipment.staging.out

    @property
    def quarantined(self) -> int:
        """Staging buffers lost to operations that never resolved."""
        return self._equipment.staging.quarantined

    async def pull(
        self,
        control: Control,
        opening: Open,
        *,
        block_ids: Sequence[int],
        tokens: int,
        timeout_s: float,
        area: Area | None = None,
    ) -> Received:
        """Pulls the KV of tokens [opening.skip_tokens, tokens) into the sequence's blocks, within `timeout_s` seconds.

        `block_ids` are all blocks of the sequence, from token 0 on. `opening.layout` is this worker's layout. `area` is
        what this sender must bring (see `overlapping`), the whole shard when it is not given; several pulls with areas
        of their own may write into the same blocks at once.
        When it returns, everything is in place and acknowledged. When it returns, raises, or is cancelled, nothing
        writes to the blocks any more: they are the caller's to reuse at once. `control` belongs to the transfer,
        which closes it; the caller must not end the underlying call before `control.aclose` is called, or posted
        receives drain slowly.

        Raises what the sender failed with, or LayoutMismatch, TransferAborted, TransferExpired, PeerLost,
        TruncatedPiece, ProtocolViolation. ValueError: the blocks do not hold that many tokens.
        """
        layout = self._equipment.arena.layout
        if opening.layout != layout:
            raise LayoutMismatch(f"a pull opens with {opening.layout}, this worker has {layout}")
        if len(block_ids) * layout.block_tokens < tokens:
            raise ValueError(f"{len(block_ids)} blocks do not hold {tokens} tokens")
        lease = Lease.grant(timeout_s, self._clock)
        incoming = Incoming(control, opening, tuple(block_ids), tokens, area or layout.area, self._equipment, lease)
        result: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        self._pulls.add(incoming)
        self._spawn(self._run(incoming, result))
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            incoming.give_up(TransferAborted("the pull was cancelled"))
            await _uninterrupted(incoming.quiet())
            raise

    async def probe(self, invitation: Invitation, timeout_s: float) -> Measured:
        """Connects to a sender that invited this receiver, and measures and checks the connection. Costs tenths of a
        second, and moves nothing but bytes of its own.

        PeerLost, TransferExpired, TruncatedPiece (bytes did not arrive as they left): it failed, and nothing else did.
        """
        probe = Probe(self._equipment, invitation, Lease.grant(timeout_s, self._clock))
        try:
            return await probe.run()
        finally:
            self._spawn(probe.drain())

    async def drained(self) -> None:
        """Waits until no given-up pull has a staging buffer on the wire. Running pulls count, too."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """Gives up every pull, waits until everything has drained, and ends the copy thread. The transport stays the
        caller's.
        """
        for incoming in self._pulls:
            incoming.give_up(TransferAborted("the receiver shuts down"))
        await self.drained()
        self._equipment.copies.close()

    async def _run(self, incoming: Incoming, result: asyncio.Future[Received]) -> None:
        try:
            received = await incoming.run()
        except BaseException as error:  # noqa: BLE001 — whatever it is, it is the caller's to see
            if not result.done():
                result.set_exception(error)
                result.exception()  # a cancelled caller does not look
        else:
            if not result.done():
                result.set_result(received)
        finally:
            self._pulls.discard(incoming)
            await incoming.drain()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _uninterrupted(work: Coroutine[None, None, None]) -> None:
    """Waits for something short, even when cancelled again."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            continue
