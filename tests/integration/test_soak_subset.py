"""Hundreds of transfers between one pair of processes leave nothing behind. `python -m loadtest soak` does tens of
thousands, over which memory can be judged, too.
"""

from __future__ import annotations

import pytest

from loadtest.kv_peer import kv_peers
from loadtest.soak import soak_pair


@pytest.mark.slow
async def test_five_hundred_transfers_leave_no_descriptor_socket_or_thread_behind() -> None:
    with kv_peers(1) as (peer,):
        soaked = await soak_pair(peer, 500)
    assert soaked.transfers == 500
    for side in (soaked.receiver, soaked.sender):
        assert max(side.descriptors, side.sockets, side.threads) <= 0
        # A staging buffer left behind by every piece would be 3 × 128 KiB a transfer; the allocator's own growth over
        # so few is a few kilobytes.
        assert side.rss_bytes_per_transfer < 20_000
