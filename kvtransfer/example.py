"""Moves the KV of one prompt from this process to another: `python -m kvtransfer.example`."""

import asyncio
import sys
from functools import partial

from kvtransfer import Arena, BlockPool, KvLayout, Open, Receiver, Sender, StreamControl, UcxTransport, serve_stream

LAYOUT = KvLayout(model="example", dtype="fp32", layers=4, kv_heads=2, head_dim=64, block_tokens=16)
TOKENS, BLOCKS, SENDER, RECEIVER = 1000, 63, "sender-of-blocks", "receiver-of-them"


async def send() -> None:
    """Computes a prompt in two chunks; the first leaves while the second is still being computed."""
    transport, arena, pool = UcxTransport(SENDER), Arena(LAYOUT, BLOCKS), BlockPool(BLOCKS)
    await transport.start()
    sender = Sender(transport, arena, incarnation=SENDER, checksums=True)
    offer = sender.offer("t1", TOKENS, pool.allocate(BLOCKS, owner="t1"), limit_s=30.0, on_released=pool.free)
    server = await asyncio.start_server(partial(serve_stream, sender, timeout_s=30.0), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvtransfer.example", str(port))
    for value, (begin, end) in enumerate(((0, 512), (512, TOKENS)), start=7):
        arena.array[:, :, list(pool.blocks("t1")[begin // 16 : -(-end // 16)])] = value
        offer.advance(end)
    offer.finish(first_token_id=42)
    print(f"the receiver exits with {await child.wait()}, {pool.counts().free} of {BLOCKS} blocks are free")
    await sender.aclose()
    await transport.aclose()


async def receive(port: int) -> None:
    """The other process: pulls the prompt into blocks of its own."""
    transport, arena = UcxTransport(RECEIVER), Arena(LAYOUT, BLOCKS)
    await transport.start()
    receiver, control = Receiver(transport, arena), StreamControl(*await asyncio.open_connection("127.0.0.1", port))
    opening = Open(
        transfer_id="t1", sender_incarnation=SENDER, receiver_incarnation=RECEIVER, layout=LAYOUT, skip_tokens=0
    )
    got = await receiver.pull(control, opening, block_ids=range(BLOCKS), tokens=TOKENS, timeout_s=30.0)
    print(
        f"{got.bytes} bytes in {got.pieces} pieces, first token {got.first_token_id}", arena.array[0, 0, ::62, 0, 0, 0]
    )
    await receiver.aclose()
    await transport.aclose()


if __name__ == "__main__":
    asyncio.run(receive(int(sys.argv[1])) if sys.argv[1:] else send())
