"""Blocks on the host: what was saved comes back into other blocks, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer import Arena, KvLayout
from kvtransfer.device import HostArena


def filled(dtype: str, blocks: int = 9) -> Arena:
    layout = KvLayout(model="m", dtype=dtype, layers=3, kv_heads=2, head_dim=4, block_tokens=5)  # type: ignore[arg-type]
    arena = Arena(layout, blocks)
    arena.array[:] = np.arange(arena.array.size).reshape(arena.array.shape) % 60_000
    return arena


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("blocks", "host_blocks", "back"),
    [
        ([], [], []),
        ([4], [0], [8]),
        ([2, 3, 4], [1, 2, 3], [5, 6, 7]),
        ([7, 2, 3, 0], [3, 4, 0, 1], [1, 8, 5, 6]),
    ],
)
def test_what_was_saved_comes_back(dtype: str, blocks: list[int], host_blocks: list[int], back: list[int]) -> None:
    arena = filled(dtype)
    host = HostArena(arena, 6)
    before = arena.array.copy()
    host.save(blocks, host_blocks)
    assert (arena.array == before).all()
    untouched = [block for block in range(6) if block not in host_blocks]
    assert not host.array[untouched].any()
    arena.array[:, :, blocks] = 0
    host.restore(host_blocks, back)
    for block, restored in zip(blocks, back, strict=True):
        assert (arena.array[:, :, restored] == before[:, :, block]).all()
    others = [block for block in range(9) if block not in (*blocks, *back)]
    assert (arena.array[:, :, others] == before[:, :, others]).all()


def test_a_part_of_the_blocks_can_come_back() -> None:
    arena = filled("fp32")
    host = HostArena(arena, 4)
    before = arena.array.copy()
    host.save([0, 1, 2], [3, 1, 2])
    host.restore([1, 2], [7, 8])
    assert (arena.array[:, :, 7:] == before[:, :, 1:3]).all()


def test_blocks_that_are_no_pairs_are_refused() -> None:
    host = HostArena(filled("fp32"), 4)
    with pytest.raises(ValueError, match="no pairs"):
        host.save([0, 1], [0])
