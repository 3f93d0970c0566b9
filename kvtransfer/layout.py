"""What one worker's KV cache looks like, as data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from kvtransfer.errors import LayoutMismatch

DType = Literal["bf16", "fp32"]

ELEMENT_BYTES: Final[dict[str, int]] = {"bf16": 2, "fp32": 4}
_MUST_AGREE: Final = ("model", "dtype", "layers", "kv_heads", "head_dim")


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """A rectangle of KV: layers [layer_begin, layer_end) × KV heads [head_begin, head_end) of the whole model."""

    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int

    def __str__(self) -> str:
        return f"layers [{self.layer_begin}, {self.layer_end}) × heads [{self.head_begin}, {self.head_end})"

    @property
    def layers(self) -> int:
        """Length of the layer range."""
        return self.layer_end - self.layer_begin

    @property
    def heads(self) -> int:
        """Length of the head range."""
        return self.head_end - self.head_begin

    def cells(self) -> set[tuple[int, int]]:
        """Every (layer, head) of it."""
        return {
            (layer, head)
            for layer in range(self.layer_begin, self.layer_end)
            for head in range(self.head_begin, self.head_end)
        }

    def common(self, other: Area) -> Area | None:
        """What both contain; None when that is nothing."""
        layers = max(self.layer_begin, other.layer_begin), min(self.layer_end, other.layer_end)
        heads = max(self.head_begin, other.head_begin), min(self.head_end, other.head_end)
        if layers[0] >= layers[1] or heads[0] >= heads[1]:
            return None
        return Area(layer_begin=layers[0], layer_end=layers[1], head_begin=heads[0], head_end=heads[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayout:
    """Layout of the KV that one worker holds.

    `model` names model and weights (a fingerprint); KV of another model never fits. `layers` and `kv_heads` count
    the whole model; [layer_begin, layer_end) × [head_begin, head_end) is this worker's shard of it. An end of 0
    means "to the last". ValueError: a count is not positive, a range is empty or outside, or the dtype is unknown.
    """

    model: str
    dtype: DType
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    layer_begin: int = 0
    layer_end: int = 0
    head_begin: int = 0
    head_end: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(ELEMENT_BYTES)}, not {self.dtype!r}")
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if _number(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {_number(self, name)}")
        object.__setattr__(self, "layer_end", self.layer_end or self.layers)
        object.__setattr__(self, "head_end", self.head_end or self.kv_heads)
        if not 0 <= self.layer_begin < self.layer_end <= self.layers:
            raise ValueError(f"layers [{self.layer_begin}, {self.layer_end}) are not within [0, {self.layers})")
        if not 0 <= self.head_begin < self.head_end <= self.kv_heads:
            raise ValueError(f"heads [{self.head_begin}, {self.head_end}) are not within [0, {self.kv_heads})")

    @property
    def local_layers(self) -> int:
        """Layers held here."""
        return self.layer_end - self.layer_begin

    @property
    def local_heads(self) -> int:
        """KV heads held here."""
        return self.head_end - self.head_begin

    @property
    def area(self) -> Area:
        """This worker's shard."""
        return Area(
            layer_begin=self.layer_begin, layer_end=self.layer_end, head_begin=self.head_begin, head_end=self.head_end
        )

    @property
    def head_bytes(self) -> int:
        """Bytes of K, or of V, of one token in one head of one layer."""
        return self.head_dim * ELEMENT_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers of this shard."""
        return 2 * self.local_layers * self.local_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of this shard."""
        return self.block_tokens * self.token_bytes

    def fingerprint(self) -> str:
        """16 hex digits over everything that must agree between two sides, so not over shards and block sizes; stable
        over processes and versions of Python.
        """
        text = "\x1f".join(f"{name}={_text(self, name)}" for name in _MUST_AGREE)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def require_compatible(sender: KvLayout, receiver: KvLayout) -> None:
    """Raises LayoutMismatch naming the first field in which KV of `sender` does not fit `receiver`. Shards and
    block_tokens may differ.
    """
    for name in _MUST_AGREE:
        ours, theirs = _text(sender, name), _text(receiver, name)
        if ours != theirs:
            raise LayoutMismatch(f"the layouts differ in {name}: the sender has {ours!r}, the receiver {theirs!r}")


def overlap(sender: KvLayout, receiver: KvLayout) -> Area:
    """What a transfer between two shards moves. LayoutMismatch: not compatible, or they have nothing in common."""
    require_compatible(sender, receiver)
    area = sender.area.common(receiver.area)
    if area is None:
        raise LayoutMismatch(f"the shards share no KV: the sender has {sender.area}, the receiver {receiver.area}")
    return area


def overlapping(receiver: KvLayout, senders: Sequence[KvLayout]) -> dict[int, Area]:
    """Which senders a receiver pulls from, by their index, and what it gets from each.

    Every sender that adds something to those before it; so of replicas of one shard the first is used (pass them in
    another order to spread the work). LayoutMismatch: not compatible, or all together do not hold the receiver's whole
    shard.
    """
    parts: dict[int, Area] = {}
    missing = receiver.area.cells()
    for index, sender in enumerate(senders):
        require_compatible(sender, receiver)
        area = sender.area.common(receiver.area)
        if area and not missing.isdisjoint(area.cells()):
            parts[index] = area
            missing -= area.cells()
    if missing:
        layer, head = min(missing)
        raise LayoutMismatch(f"no sender has layer {layer}, head {head} for the receiver's {receiver.area}")
    return parts


def _number(layout: KvLayout, name: str) -> int:
    return cast("int", object.__getattribute__(layout, name))


def _text(layout: KvLayout, name: str) -> str:
    return str(object.__getattribute__(layout, name))
