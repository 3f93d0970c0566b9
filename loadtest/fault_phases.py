"""A control stream that notices at which phase its transfer is, and lets something happen there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvtransfer.messages import Accepted, Acknowledge, Control, Message, Open, Posted, Sent
from loadtest.fault_table import Phase, Side

PIECE_S: Final = 0.002
"""How long a piece of 4 MB, which takes 4 to 8 ms on loopback, is on its way when something happens to it."""

MID_PIECE: Final = 1


class PhasedControl:
    """Calls `act` once, at `phase`.

    With `before`, ahead of the word that marks it, if this side says that word; else after it, and in the two phases
    of a piece PIECE_S later, when the piece is on its way.
    """

    def __init__(
        self, inner: Control, side: Side, phase: Phase, act: Callable[[], None], *, before: bool = False
    ) -> None:
        self._inner, self._side, self._phase, self._act, self._before = inner, side, phase, act, before
        self._last_piece = -1
        self._acted = False

    async def send(self, message: Message) -> None:
        """See Control."""
        self._note(message)
        marks = self._marks(message)
        if marks and (self._before or isinstance(message, Open)):
            self._reach()
        await self._inner.send(message)
        if marks:
            self._reach(later=isinstance(message, Sent))

    async def receive(self) -> Message | None:
        """See Control."""
        if self._side is Side.SENDER and self._phase is Phase.OFFERED:
            self._reach()
        message = await self._inner.receive()
        if message is not None:
            self._note(message)
            if self._marks(message):
                self._reach(later=isinstance(message, Sent) and not self._before)
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

    def _reach(self, *, later: bool = False) -> None:
        if self._acted:
            return
        self._acted = True
        if later:
            asyncio.get_running_loop().call_later(PIECE_S, self._act)
        else:
            self._act()
