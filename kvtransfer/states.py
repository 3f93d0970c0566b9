"""The lives in a transfer: the sending side's, the receiving side's, and a staging buffer's. One table each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, Generic, TypeVar

from kvtransfer.errors import IllegalTransition


class SendState(Enum):
    """An offer: from the moment its blocks are promised until nobody reads them any more."""

    OFFERED = "offered"
    SENDING = "sending"
    SENT = "sent"
    """Every part was asked for, and Finished was said to all; waits for the last acknowledgement."""
    DRAINING = "draining"
    """Given up; a gather may still read the blocks."""
    RELEASED = "released"


class ReceiveState(Enum):
    """One pull."""

    OPENING = "opening"
    RECEIVING = "receiving"
    RECEIVED = "received"
    """Everything is in place and was acknowledged."""
    DRAINING = "draining"
    """Given up; posted receives may still be written."""
    CLOSED = "closed"


class BufferState(Enum):
    """A staging buffer: one loan of memory."""

    TAKEN = "taken"
    """Somebody fills or empties it; the wire does not know it."""
    POSTED = "posted"
    """The wire may read or write it."""
    DRAINING = "draining"
    """Nobody waits for it any more, but the wire may still touch it."""
    QUARANTINED = "quarantined"
    """The wire never let go of it. Its memory is never used again."""
    FREE = "free"
    """The loan is over: the memory is somebody else's."""


SEND_TRANSITIONS: Final[Mapping[SendState, frozenset[SendState]]] = {
    SendState.OFFERED: frozenset({SendState.SENDING, SendState.DRAINING}),
    SendState.SENDING: frozenset({SendState.SENT, SendState.DRAINING}),
    SendState.SENT: frozenset({SendState.RELEASED, SendState.DRAINING}),
    SendState.DRAINING: frozenset({SendState.RELEASED}),
    SendState.RELEASED: frozenset(),
}
RECEIVE_TRANSITIONS: Final[Mapping[ReceiveState, frozenset[ReceiveState]]] = {
    ReceiveState.OPENING: frozenset({ReceiveState.RECEIVING, ReceiveState.DRAINING}),
    ReceiveState.RECEIVING: frozenset({ReceiveState.RECEIVED, ReceiveState.DRAINING}),
    ReceiveState.RECEIVED: frozenset({ReceiveState.CLOSED}),
    ReceiveState.DRAINING: frozenset({ReceiveState.CLOSED}),
    ReceiveState.CLOSED: frozenset(),
}
BUFFER_TRANSITIONS: Final[Mapping[BufferState, frozenset[BufferState]]] = {
    BufferState.TAKEN: frozenset({BufferState.POSTED, BufferState.FREE}),
    BufferState.POSTED: frozenset({BufferState.TAKEN, BufferState.FREE, BufferState.DRAINING}),
    BufferState.DRAINING: frozenset({BufferState.FREE, BufferState.QUARANTINED}),
    BufferState.QUARANTINED: frozenset(),
    BufferState.FREE: frozenset(),
}

S = TypeVar("S", bound=Enum)


class Life(Generic[S]):
    """Where one thing is in its table, and how it came there."""

    def __init__(self, name: str, start: S, transitions: Mapping[S, frozenset[S]], history_limit: int = 16) -> None:
        self._name = name
        self._transitions = transitions
        self._history = [start]
        self._history_limit = history_limit

    @property
    def state(self) -> S:
        """Where it is now."""
        return self._history[-1]

    @property
    def history(self) -> tuple[S, ...]:
        """The last states, oldest first."""
        return tuple(self._history)

    def advance(self, state: S) -> None:
        """Moves along one edge. IllegalTransition: the table has no such edge; nothing moved."""
        if state not in self._transitions[self.state]:
            path = " → ".join(each.value for each in self._history)
            raise IllegalTransition(f"{self._name} cannot go to {state.value}; its way was {path}")
        self._history.append(state)
        del self._history[: -self._history_limit]
