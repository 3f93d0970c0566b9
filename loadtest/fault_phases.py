"""A control stream that notices at which phase its transfer is, and lets something happen there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from kvtransfer.messages import Accepted, Acknowledge, Control, Message, Open, Posted, Sent
from loadtest.fault_table import Phase, Side

PIECE_S: Final = 0.002
"""How long a piece of 4 MB, which takes 4 to 8 ms on loopback, is on its way when something happens to it."""

MID_PIECE: Final = 1


class PhasedControl:
    """Calls `act` once, at `phase`.

    With `before`, ahead of the word that marks it, if this side says that word; else after it, and in the two phases
    of a piece PIECE_S later, when the piece is on its way. Nothing more is said or heard until `act` is done, however
    busy the machine is: no transfer gets past its phase.
    """

    def __init__(
        self, inner: Control, side: Side, phase: Phase, act: Callable[[], Awaitable[None]], *, before: bool = False
    ) -> None:
        self._inner, self._side, self._phase, self._act, self._before = inner, side, phase, act, before
        self._last_piece = -1
        self._acting: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """See Control."""
        self._note(message)
        marks = self._marks(message)
        if marks and (self._before or isinstance(message, Open)):
            self._reach(0.0)
        await self._done()
        await self._inner.send(message)
        if marks and isinstance(message, Sent):
            self._reach(PIECE_S)  # the piece leaves only when this has returned
        elif marks:
            self._reach(0.0)
            await self._done()

    async def receive(self) -> Message | None:
        """See Control."""
        if self._side is Side.SENDER and self._phase is Phase.OFFERED:
            self._reach(0.0)
        await self._done()
        message = await self._inner.receive()
        if message is not None:
            self._note(message)
            if self._marks(message):
                self._reach(PIECE_S if isinstance(message, Sent) and not self._before else 0.0)
        await self._done()
        return message

    async def close(self) -> None:
        """See Control."""
        await self._inner.close()

    async def aclose(self) -> None:
        """See Control."""
        await self._inner.aclose()

    def _note(self, message: Message) -> None:
        if isinstance(message, Accepted):
            self._last_piece = message.pieces - 1

    def _marks(self, message: Message) -> bool:
        match self._phase, message:
            case (Phase.OFFERED, Open()):
                return self._side is Side.RECEIVER
            case (Phase.POSTED, Posted()) | (Phase.ACKNOWLEDGED, Acknowledge()):
                return True
            case (Phase.MID_PIECE, Sent(piece=piece)):
                return piece == MID_PIECE
            case (Phase.LAST_PIECE, Sent(piece=piece)):
                return piece == self._last_piece
        return False

    def _reach(self, later_s: float) -> None:
        if self._acting is None:
            self._acting = asyncio.ensure_future(self._act_later(later_s))

    async def _act_later(self, later_s: float) -> None:
        await asyncio.sleep(later_s)
        await self._act()

    async def _done(self) -> None:
        if self._acting:
            await asyncio.wait([self._acting])
