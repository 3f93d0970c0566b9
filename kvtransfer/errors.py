"""Errors of the data plane.

    TransferError
    ├── OutOfBlocks            RESOURCE_EXHAUSTED   no room in the block pool
    ├── BlockStateError        INTERNAL             the block accounting was used wrongly
    ├── IllegalTransition      INTERNAL             a life took an edge that does not exist
    ├── UnknownTransfer        NOT_FOUND            never offered here, or expired before it was pulled
    ├── TransferUsed           FAILED_PRECONDITION  a hand-off is used once
    ├── WrongIncarnation       FAILED_PRECONDITION  another life of the worker was meant
    ├── LayoutMismatch         FAILED_PRECONDITION  the two sides' KV does not fit together
    ├── TransferAborted        ABORTED              given up by either side
    ├── TruncatedPiece         ABORTED              a piece arrived short, long or damaged
    ├── ProtocolViolation      ABORTED              the peer said something out of turn
    ├── TransferExpired        DEADLINE_EXCEEDED    out of time in mid-transfer
    ├── PeerLost               UNAVAILABLE          the peer's process or connection is gone
    └── TransportUnavailable   UNAVAILABLE          this process cannot use the transport at all

`code` is the name of the gRPC status that fits; `retryable` says whether a new hand-off (another transfer id) may
succeed.
"""

from __future__ import annotations

from typing import ClassVar


class TransferError(Exception):
    """Base of every error raised by this package."""

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False


class OutOfBlocks(TransferError):
    """The pool has fewer free blocks than were asked for; nothing was allocated."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True


class BlockStateError(TransferError):
    """An owner is unknown, or in a state in which the call makes no sense."""


class IllegalTransition(TransferError):
    """A lifecycle was asked to take an edge that its table does not have. The message carries the history."""


class UnknownTransfer(TransferError):
    """No such hand-off is offered here: never, not in time, or not any more."""

    code = "NOT_FOUND"
    retryable = True


class TransferUsed(TransferError):
    """The transfer id was offered or pulled before."""

    code = "FAILED_PRECONDITION"


class WrongIncarnation(TransferError):
    """The call was meant for another life of this worker."""

    code = "FAILED_PRECONDITION"
    retryable = True


class LayoutMismatch(TransferError):
    """The two layouts, or the two manifests, differ; the message names the field and both values."""

    code = "FAILED_PRECONDITION"


class TransferAborted(TransferError):
    """The transfer was given up: by the sender, the receiver, or whoever computes the KV."""

    code = "ABORTED"
    retryable = True


class TruncatedPiece(TransferError):
    """A piece arrived with another length or checksum than announced."""

    code = "ABORTED"
    retryable = True


class ProtocolViolation(TransferError):
    """A control message came out of turn or contradicts an earlier one."""

    code = "ABORTED"
    retryable = True


class TransferExpired(TransferError):
    """The deadline or the lease passed before the transfer was complete."""

    code = "DEADLINE_EXCEEDED"


class PeerLost(TransferError):
    """The peer's connection broke or could not be made. The endpoint is not used again."""

    code = "UNAVAILABLE"
    retryable = True


class TransportUnavailable(TransferError):
    """The transport cannot run in this process (library missing, no usable device, not started)."""

    code = "UNAVAILABLE"
