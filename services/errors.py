"""Errors that cross a service boundary.

    DiptychError                INTERNAL
    ├── InvalidArgument         INVALID_ARGUMENT     the caller's input; names the field and its limit
    ├── NotFound                NOT_FOUND            no such model, transfer
    ├── AlreadyExists           ALREADY_EXISTS       an id that must be fresh was used before
    ├── NotAdmitted             RESOURCE_EXHAUSTED   no room now; carries when to try again
    ├── WrongState              FAILED_PRECONDITION  another incarnation, draining, already used
    ├── HandOffLost             ABORTED              the other leg is gone; place the request again
    ├── Unavailable             UNAVAILABLE          try elsewhere
    ├── DeadlineExceeded        DEADLINE_EXCEEDED
    └── Cancelled               CANCELLED
    StartError                  (never on the wire)  a service that cannot start: one line, exit status 1

Each class has its gRPC code (by name: pure cores import no gRPC) and says whether placing the request again may help.
`services.rpc.errors` maps them to statuses and back; the error trees of `kvtransfer` and `services.engine` follow the
same two attributes.
"""

from __future__ import annotations

from typing import ClassVar


class DiptychError(Exception):
    """Base of the tree. `code` is the gRPC status name; `retryable`: another placement may serve the request."""

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False


class InvalidArgument(DiptychError):
    """Bad input; `field` is the request's field as the client knows it."""

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field


class NotFound(DiptychError):
    """Something named in the request does not exist."""

    code = "NOT_FOUND"


class AlreadyExists(DiptychError):
    """An id that must be fresh was used before."""

    code = "ALREADY_EXISTS"


class NotAdmitted(DiptychError):
    """No room now; `retry_after_s` is a guess at when there is."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WrongState(DiptychError):
    """The callee is not who was meant, or not in a state to do this."""

    code = "FAILED_PRECONDITION"
    retryable = True


class HandOffLost(DiptychError):
    """The other leg of the request failed, so this one cannot go on."""

    code = "ABORTED"
    retryable = True


class Unavailable(DiptychError):
    """Nobody is there to serve this now."""

    code = "UNAVAILABLE"
    retryable = True


class DeadlineExceeded(DiptychError):
    """The time given for this is over."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(DiptychError):
    """Whoever asked for this went away."""

    code = "CANCELLED"


class StartError(DiptychError):
    """A service cannot start; the message is the one line a person needs."""
