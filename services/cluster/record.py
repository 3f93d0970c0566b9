"""What a worker says about itself, as it stands in Redis."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from services.latency import Latency, latency_from

MAX_LINKS = 64
"""A worker tells of no more: its record is sent with every heartbeat."""

Role = Literal["prefill", "decode"]
State = Literal["starting", "ready", "draining"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCounts:
    """KV blocks of a worker; free + held + leased + swapped == total. `cached` of the free ones hold a known prefix.

    `swapped` are in host memory, total − swapped is the pool. `host`: what may be placed beyond the pool.
    """

    total: int = 0
    free: int = 0
    held: int = 0
    leased: int = 0
    swapped: int = 0
    cached: int = 0
    host: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The data plane from a peer to this worker, measured when the two met. With an `error` nothing was measured."""

    peer: str  # its name
    peer_incarnation: str
    transport: str = ""  # "ucx"
    lanes: str = ""  # what carries it, transport/device: "tcp/eth0"
    bytes_per_s: float = 0.0
    round_trip_s: float = 0.0
    error: str = ""
    warning: str = ""  # why a faster one was to be expected


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecord:
    """One live worker. Identity is (address, incarnation); the rest is news of its last heartbeat."""

    name: str
    address: str  # gRPC, HOST:PORT
    incarnation: str  # 16 hex digits
    role: Role
    state: State
    model: str  # served name
    fingerprint: str  # model and precision: KV moves only between workers that agree in it
    context_tokens: int
    block_tokens: int
    blocks: BlockCounts
    queued_tokens: int = 0  # prompt tokens accepted and not computed yet
    running: int = 0  # requests
    waiting: int = 0  # requests
    swapped: int = 0  # of the waiting requests: their KV is on the host
    levels: tuple[int, ...] = ()  # requests by level of the schedule, the top first
    schedule: str = ""  # by name
    latency: Latency = field(default_factory=Latency)  # what it has learned about its own speed
    links: tuple[Link, ...] = ()  # from peers that live, at most MAX_LINKS

    @property
    def capacity_tokens(self) -> int:
        """Tokens its KV pool can hold."""
        return (self.blocks.total - self.blocks.swapped) * self.block_tokens

    @property
    def placed_tokens(self) -> int:
        """Most tokens that should be placed on it: where running requests give way, host memory counts."""
        return self.capacity_tokens + self.blocks.host * self.block_tokens

    @property
    def idle(self) -> bool:
        """Holds no request at all."""
        return self.running == 0 and self.waiting == 0

    def to_json(self) -> str:
        """The record as stored."""
        return json.dumps(asdict(self), separators=(",", ":"))


def from_json(text: str) -> WorkerRecord:
    """Reads a stored record; fields that this version does not know are passed over. ValueError when it is none."""
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError("not a worker record")
    blocks = fields.get("blocks")
    if not isinstance(blocks, dict):
        raise ValueError("blocks: missing")
    if fields.get("role") not in get_args(Role) or fields.get("state") not in get_args(State):
        raise ValueError(f"unknown role or state: {fields.get('role')!r}, {fields.get('state')!r}")
    return WorkerRecord(
        name=_text(fields, "name"),
        address=_text(fields, "address"),
        incarnation=_text(fields, "incarnation"),
        role=fields["role"],
        state=fields["state"],
        model=_text(fields, "model"),
        fingerprint=_text(fields, "fingerprint"),
        context_tokens=_count(fields, "context_tokens"),
        block_tokens=_count(fields, "block_tokens"),
        blocks=BlockCounts(**{name: _count(blocks, name) for name in BlockCounts.__dataclass_fields__}),
        queued_tokens=_count(fields, "queued_tokens"),
        running=_count(fields, "running"),
        waiting=_count(fields, "waiting"),
        swapped=_count(fields, "swapped"),
        levels=_counts(fields, "levels"),
        schedule=_text(fields, "schedule"),
        latency=latency_from(fields.get("latency")),
        links=_links(fields.get("links", [])),
    )


def _links(value: object) -> tuple[Link, ...]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"links: {value!r} is not a list of links")
    return tuple(
        Link(
            peer=_text(each, "peer"),
            peer_incarnation=_text(each, "peer_incarnation"),
            transport=_text(each, "transport"),
            lanes=_text(each, "lanes"),
            bytes_per_s=_amount(each, "bytes_per_s"),
            round_trip_s=_amount(each, "round_trip_s"),
            error=_text(each, "error"),
            warning=_text(each, "warning"),
        )
        for each in value[:MAX_LINKS]
    )


def _amount(fields: Mapping[str, object], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{name}: {value!r} is not a finite amount")
    return float(value)


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: {value!r} is not text")
    return value


def _count(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: {value!r} is not a count")
    return value


def _counts(fields: Mapping[str, object], name: str) -> tuple[int, ...]:
    values = fields.get(name)
    if not isinstance(values, list):
        raise ValueError(f"{name}: {values!r} is not a list of counts")
    return tuple(_count({name: value}, name) for value in values)
