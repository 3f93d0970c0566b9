"""A transfer leaves no reference cycle: its objects are gone when it is over, not at some later collection."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

from kv_pairs import RECEIVER, Pair, pair_over

from kvtransfer import MemoryTransport

TRANSFERS = 10


async def transferred(pair: Pair, name: str) -> None:
    pair.fill(name, 20)
    offer = pair.offer(name, 20)
    offer.advance(20)
    offer.finish(1)
    await pair.pull(name, 20)
    await asyncio.gather(*pair.served)
    await pair.receiver.drained()
    pair.target.pool.free(name)
    pair.controls.clear()
    pair.served.clear()


async def test_nothing_of_a_transfer_waits_for_the_collector() -> None:
    """A cancelled task kept its pull alive, a released offer itself: memory grew by kilobytes a transfer between two
    full collections, which are rare in a process with hundreds of thousands of imported objects.
    """
    transport = MemoryTransport(RECEIVER)
    await transport.start()
    async with pair_over(transport, transport) as pair:
        await transferred(pair, "first")
        gc.collect()
        gc.disable()
        flags = gc.get_debug()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for i in range(TRANSFERS):
                await transferred(pair, f"t{i}")
            gc.collect()
            left = Counter(type(each).__name__ for each in gc.garbage)
        finally:
            gc.set_debug(flags)
            gc.garbage.clear()
            gc.enable()
    await transport.aclose()
    assert not {name: count for name, count in left.items() if count >= TRANSFERS}
