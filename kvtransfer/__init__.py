"""Moves KV caches between two processes: blocks, layouts, buffers and peers, and nothing about who uses them.

What there is:

- `KvLayout` says what a worker's KV looks like; `Arena` holds its blocks in one allocation (NumPy or CuPy);
  `BlockPool` accounts for them.
- `Sender.offer` promises the KV of a sequence, while it is still being computed; `Offer.advance` says how far it is,
  `Offer.finish` gives the first token, `Offer.fail` gives it up. `Sender.serve` answers one pull.
- `Receiver.pull` brings an offer into the blocks of another arena and returns what it measured.
- A `Control` carries the small messages of one pull between the two, in both directions; you bring it (a gRPC stream, a
  pair of queues). The KV itself travels over a `Transport`: `UcxTransport` between processes, `MemoryTransport`
  within one.

A sender, in its process (all of it on one event loop; `control` is your end of the stream)::

    layout = KvLayout(model="m", dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=16)
    arena, pool = Arena(layout, blocks=512), BlockPool(512)
    transport = UcxTransport(incarnation)
    await transport.start()
    sender = Sender(transport, arena, incarnation=incarnation)

    blocks = pool.allocate(blocks=64, owner="t1")
    pool.lease("t1")
    offer = sender.offer("t1", tokens=1000, block_ids=blocks, limit_s=30.0, on_released=pool.free)
    ...                        # write KV into arena.array[:, :, blocks], and after each chunk of the prompt
    offer.advance(512)         # say how many tokens are complete
    offer.advance(1000)
    offer.finish(first_token_id=42)

    await sender.serve(control, timeout_s=30.0)      # once for each pull that comes in

The receiver, in another::

    opening = Open(transfer_id="t1", sender_incarnation=..., receiver_incarnation=..., layout=layout, skip_tokens=0)
    received = await receiver.pull(control, opening, block_ids=blocks, tokens=1000, timeout_s=30.0)

A receiver whose senders are sharded otherwise asks `overlapping` which of them have its layers and heads, and pulls
from each, into the same blocks::

    async with asyncio.TaskGroup() as pulls:
        for index, area in overlapping(layout, sender_layouts).items():
            pulls.create_task(receiver.pull(controls[index], openings[index], area=area, block_ids=blocks, ...))

An offer serves all receiver shards that overlap it; `consumers` tells it how many of them hold the same heads.

What holds:

- Every part of a hand-off is used once. Unknown, used, expired, released and mismatched ones fail with their own error
  (see `errors`), before or during the transfer, never with a wrong block.
- Sender and receiver may have different block sizes, and shards of different degrees of tensor and pipeline
  parallelism. Both compute the same list of pieces from the two layouts.
- `on_released` is called exactly once for each offer; afterwards nothing reads its blocks. When `pull` ends, in
  whatever way, nothing writes to its blocks any more. The wire itself touches staging buffers only, and those are
  reused only after it has let go of them.
- When a peer dies, pulls fail with PeerLost, and the transport stays usable for everybody else.
"""

from __future__ import annotations

from kvtransfer.blocks import BlockCounts, BlockPool, BlockState
from kvtransfer.device import Arena
from kvtransfer.errors import (
    BlockStateError,
    IllegalTransition,
    LayoutMismatch,
    OutOfBlocks,
    PeerLost,
    ProtocolViolation,
    TransferAborted,
    TransferError,
    TransferExpired,
    TransferUsed,
    TransportUnavailable,
    TruncatedPiece,
    UnknownTransfer,
    WrongIncarnation,
)
from kvtransfer.layout import Area, KvLayout, overlapping, require_compatible
from kvtransfer.manifest import Manifest, Piece, plan_pieces
from kvtransfer.messages import Accepted, Acknowledge, Control, Finished, Message, Open, Posted, Sent
from kvtransfer.offer import Offer
from kvtransfer.received import Received
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.transport.base import Counters, Transport
from kvtransfer.transport.memory import MemoryTransport
from kvtransfer.transport.ucx import UcxTransport

__all__ = [
    "Accepted",
    "Acknowledge",
    "Area",
    "Arena",
    "BlockCounts",
    "BlockPool",
    "BlockState",
    "BlockStateError",
    "Control",
    "Counters",
    "Finished",
    "IllegalTransition",
    "KvLayout",
    "LayoutMismatch",
    "Manifest",
    "MemoryTransport",
    "Message",
    "Offer",
    "Open",
    "OutOfBlocks",
    "PeerLost",
    "Piece",
    "Posted",
    "ProtocolViolation",
    "Received",
    "Receiver",
    "Sender",
    "Sent",
    "TransferAborted",
    "TransferError",
    "TransferExpired",
    "TransferUsed",
    "Transport",
    "TransportUnavailable",
    "TruncatedPiece",
    "UcxTransport",
    "UnknownTransfer",
    "WrongIncarnation",
    "overlapping",
    "plan_pieces",
    "require_compatible",
]
