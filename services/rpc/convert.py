"""Small converters between proto types and plain values."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration


def to_duration(seconds: float) -> Duration:
    """A proto Duration; negative values (clock skew of a remaining time) become zero."""
    duration = Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration


def to_seconds(duration: Duration) -> float:
    """Seconds of a proto Duration; an absent one is zero."""
    return duration.ToNanoseconds() / 1e9
