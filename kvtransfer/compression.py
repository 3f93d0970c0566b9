"""Which encoding a transfer uses: both sides have a say, and what neither asks for does not happen.

The receiver says in Open what it allows, the sender chooses in Accepted. With "auto" on either side an encoding is used
only when the connection was measured and carries fewer bytes a second than the sender's prefill produces: on a faster
one plain KV hides behind the computation of the next chunk, and the encoding would cost precision for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvtransfer.codec import Encoding

Compression = Literal["off", "int8", "fp8", "auto"]
"""What a side wants; "auto" leaves the encoding open, too."""

MOST_PRECISE_FIRST: Final[tuple[Encoding, ...]] = ("int8", "fp8")
"""By the error in the logits on real text; they need the same bytes to within 3 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """What a receiver takes, and what it knows of the connection. Plain KV is always allowed.

    `link_bytes_per_s`: 0 when it was not measured. `only_if_slower`: use no encoding unless it was, and the sender
    produces KV faster. ValueError: the bandwidth is negative or no number.
    """

    encodings: tuple[Encoding, ...] = ()
    link_bytes_per_s: float = 0.0
    only_if_slower: bool = False

    def __post_init__(self) -> None:
        if not self.link_bytes_per_s >= 0:
            raise ValueError(f"link_bytes_per_s must be at least 0, is {self.link_bytes_per_s}")


PLAIN_ONLY: Final = Allowed()


def allow(compression: Compression, link_bytes_per_s: float = 0.0) -> Allowed:
    """What a receiver that wants `compression` says to a sender that it hears at so many bytes a second."""
    if compression == "off":
        return PLAIN_ONLY
    encodings = MOST_PRECISE_FIRST if compression == "auto" else (compression,)
    return Allowed(encodings=encodings, link_bytes_per_s=link_bytes_per_s, only_if_slower=compression == "auto")


def choose(compression: Compression, allowed: Allowed, produced_bytes_per_s: float) -> Encoding:
    """What a sender that wants `compression` uses. `produced_bytes_per_s` of KV: 0 when it is not known yet."""
    wanted = MOST_PRECISE_FIRST if compression == "auto" else (compression,)
    common = [encoding for encoding in MOST_PRECISE_FIRST if encoding in wanted and encoding in allowed.encodings]
    slower = 0 < allowed.link_bytes_per_s < produced_bytes_per_s
    if not common or ((compression == "auto" or allowed.only_if_slower) and not slower):
        return "plain"
    return common[0]
