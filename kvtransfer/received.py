"""What a pull measured."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.codec import Encoding


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """What a pull brought.

    `bytes` and `pieces` count what arrived, the bytes as this `encoding` made them. `wire_s` is the time in which at
    least one piece was known to be on the wire. `exposed_s` is the part of the transfer that nothing hid: from the end
    of the prompt's computation until everything was in place (the time that the sender's last word took to come left
    out).
    """

    first_token_id: int
    finished: str | None
    bytes: int
    pieces: int
    duration_s: float
    exposed_s: float
    wire_s: float
    transport: str
    encoding: Encoding

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes over wire time; 0 when nothing was moved."""
        return self.bytes / self.wire_s / 1e9 if self.wire_s > 0 else 0.0
