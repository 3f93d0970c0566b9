from __future__ import annotations

import zlib

import numpy as np
import pytest

from kvtransfer.copying import checksum
from kvtransfer.device import Arena
from kvtransfer.layout import KvLayout

ROW = 509 * 8
SIZES = (0, 1, ROW - 1, ROW, ROW + 1, 3 * ROW + 5)


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def by_hand(content: bytes) -> int:
    """The definition, word by word."""
    whole = len(content) // ROW * ROW
    rows = [
        [int.from_bytes(content[at : at + 8], "little") for at in range(begin, begin + ROW, 8)]
        for begin in range(0, whole, ROW)
    ]
    columns = [sum(row[at] for row in rows) % 2**64 for at in range(ROW // 8)]
    return zlib.crc32(content[whole:] + b"".join(each.to_bytes(8, "little") for each in columns))


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_its_definition_says(size: int) -> None:
    content = random_bytes(size)
    assert checksum(content) == by_hand(content.tobytes())


@pytest.mark.parametrize("size", SIZES[1:])
def test_it_sees_every_changed_byte(size: int) -> None:
    content = random_bytes(size)
    good = checksum(content)
    for at in {0, size // 2, size - 1, *range(0, size, 509)}:
        content[at] ^= 1
        assert checksum(content) != good
        content[at] ^= 1
    assert checksum(content) == good


@pytest.mark.parametrize("words", [1, 64, 384, 508, 510, 512, 1 << 12, 1 << 15])
def test_it_sees_words_heads_blocks_and_pages_that_changed_places(words: int) -> None:
    content = random_bytes(2 * 8 * words + 3 * ROW)
    parts = content[: 2 * 8 * words].reshape(2, 8 * words)
    good = checksum(content)
    parts[[0, 1]] = parts[[1, 0]]
    assert checksum(content) != good


def test_it_sees_what_was_never_written() -> None:
    content = random_bytes(4 * ROW)
    good = checksum(content)
    content[2 * ROW :] = 0
    assert checksum(content) != good


@pytest.mark.parametrize("size", [1, 1 << 16, (2 << 20) - 1, 2 << 20, (2 << 20) + 1])
def test_staging_begins_at_a_page_and_can_be_written(size: int) -> None:
    layout = KvLayout(model="m", dtype="bf16", layers=1, kv_heads=1, head_dim=8, block_tokens=16)
    buffer = Arena(layout, 1).staging(size)
    buffer[:] = 7
    assert buffer.size == size
    assert buffer.ctypes.data % 4096 == 0
