"""Moves KV caches between two processes: blocks, layouts, buffers and peers, and nothing about who uses them.

It needs NumPy and, between processes, ucxx or ucp (CuPy for a GPU's memory); no torch, no gRPC, no Redis. `example` is
a whole program in 40 lines: `python -m kvtransfer.example`.

**What there is**

- `KvLayout` says what a worker's KV looks like; `Arena` holds its blocks in one allocation (NumPy or CuPy; torch takes
  `arena.array` as it is); `BlockPool` accounts for them.
- `Sender.offer` promises the KV of a sequence, while it is still being computed; `Offer.advance` says how far it is,
  `Offer.finish` gives the first token, `Offer.fail` gives it up. `Sender.serve` answers one pull.
- `Receiver.pull` brings an offer into the blocks of another arena and returns what it measured (`Received`).
- A `Control` carries the small messages of one pull between the two, in both directions: `StreamControl` over a socket
  or pipe, or your own over an RPC stream. The KV itself travels over a `Transport`: `UcxTransport` between processes,
  `MemoryTransport` within one.

One `Transport`, one `Arena`, one `Sender` or `Receiver` (or both) make a worker. An incarnation is 16 characters, drawn
anew at every start of the process: a peer that came back is another peer. All calls belong to the event loop on which
the transport was started; copies run in a thread of their own, and UCX has one.

**A sender**, in its process::

    layout = KvLayout(model="m", dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=16)
    arena, pool = Arena(layout, blocks=512), BlockPool(512)
    transport = UcxTransport(incarnation, host="10.0.0.5")    # the device that others reach; loopback by default
    await transport.start()
    sender = Sender(transport, arena, incarnation=incarnation, checksums=True)

    blocks = pool.allocate(blocks=64, owner="t1")
    pool.lease("t1")
    offer = sender.offer("t1", tokens=1000, block_ids=blocks, limit_s=120.0, lease_s=30.0, on_released=pool.free)
    ...                        # write KV into arena.array[:, :, blocks], and after each chunk of the prompt
    offer.advance(512)         # say how many tokens are complete: they leave at once, if they are being pulled
    offer.advance(1000)
    offer.finish(first_token_id=42)

    server = await asyncio.start_server(partial(serve_stream, sender, timeout_s=30.0), "10.0.0.5", 7000)

`serve_stream` is `sender.serve(control, timeout_s)` and the ends of the connection; with an RPC library of your own,
call `serve` once for each pull that comes in. A pull may come before its offer, and waits for it.

**A receiver**, in another. It needs the transfer's id, the sender's incarnation and where its control is served::

    control = StreamControl(*await asyncio.open_connection("10.0.0.5", 7000))
    opening = Open(transfer_id="t1", sender_incarnation=..., receiver_incarnation=..., layout=layout, skip_tokens=0)
    received = await receiver.pull(control, opening, block_ids=blocks, tokens=1000, timeout_s=30.0)

With `skip_tokens` nothing is sent of what the receiver holds already. `block_ids` are all blocks of the sequence, from
token 0 on; they are written to only where something arrives.

A receiver whose senders are sharded otherwise asks `overlapping` which of them have its layers and heads, and pulls
from each, into the same blocks::

    async with asyncio.TaskGroup() as pulls:
        for index, area in overlapping(layout, sender_layouts).items():
            pulls.create_task(receiver.pull(controls[index], openings[index], area=area, block_ids=blocks, ...))

An offer serves all receiver shards that overlap it; `consumers` tells it how many of them hold the same heads.

**What holds**

- Every part of a hand-off is used once. Unknown, used, expired, released and mismatched ones fail with their own error,
  before or during the transfer, never with a wrong block. `errors` draws the tree: each class names a gRPC status and
  says whether a new hand-off may succeed.
- Sender and receiver compute the same list of pieces from the two layouts, which must agree in the model and may
  differ in block size and in the degrees of tensor and pipeline parallelism (see `layout`, `manifest`).
- `on_released` is called exactly once for each offer; afterwards nothing reads its blocks. When `pull` ends, in
  whatever way, nothing writes to its blocks any more. The wire itself touches staging buffers only, and those are
  reused only after it has let go of them. So a cancel, on either side, is always safe and always quick.
- When a peer dies, pulls fail with PeerLost, and the transport stays usable for everybody else. A peer that stands
  still fails nothing by itself: the deadlines do, and every wait has one.

**Leases.** An offer ends at its limit, or earlier, at the end of its lease, when nobody pulls it. A receiver that has
no blocks yet has `Sender.renew` called, by a message of yours, three times in a lease; a dead one does not. Once it is
pulled, the limit counts alone.

**Meeting a peer.** The first transfer pays for the connection. `Sender.invite` makes an `Invitation`, a message of
yours brings it to the receiver, `Sender.answer` and `Receiver.probe` connect, measure latency and bandwidth, compare
bytes, and say which of UCX's transports carries them. `shortfall` says whether a better one was to be expected.

**Slow connections.** Nothing is encoded unless both sides want it: a sender made with `compression="int8"` (or "fp8",
or "auto") sends so to receivers that say `Open(allowed=allow("int8"))`. It halves the bytes, and costs precision: see
`codec` and `compression`. `Received.encoding` says what was used.

**Environment.** `UCX_*` variables win over the settings made here. Between CPU processes tcp is used: UCX's
shared-memory transports kill or hang the survivor of a peer's death. With `cuda=True` UCX may choose RDMA and cuda_ipc.

**The end**: `aclose` the sender or receiver (it gives up what runs and waits until everything has drained), then the
transport. A process that ends without it may hang in UCX's threads.
"""

from __future__ import annotations

from kvtransfer.blocks import BlockCounts, BlockPool, BlockState
from kvtransfer.codec import Encoding
from kvtransfer.compression import Allowed, Compression, allow
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
from kvtransfer.probe import Invitation, Measured, rdma_devices, shortfall
from kvtransfer.received import Received
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.stream_control import StreamControl, serve_stream
from kvtransfer.transport.base import Counters, Transport
from kvtransfer.transport.memory import MemoryTransport
from kvtransfer.transport.ucx import UcxTransport

__all__ = [
    "Accepted",
    "Acknowledge",
    "Allowed",
    "Area",
    "Arena",
    "BlockCounts",
    "BlockPool",
    "BlockState",
    "BlockStateError",
    "Compression",
    "Control",
    "Counters",
    "Encoding",
    "Finished",
    "IllegalTransition",
    "Invitation",
    "KvLayout",
    "LayoutMismatch",
    "Manifest",
    "Measured",
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
    "StreamControl",
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
    "allow",
    "overlapping",
    "plan_pieces",
    "rdma_devices",
    "require_compatible",
    "serve_stream",
    "shortfall",
]
