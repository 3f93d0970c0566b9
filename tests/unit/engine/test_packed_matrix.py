"""Packed matrices: every number is found again, wherever it was written from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.native.memory import Stretch
from services.engine.native.packed import PackedMatrix

DTYPES = (torch.float32, torch.bfloat16)


def random(n: int, k: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(deadline=None)
@given(
    parts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    k=st.integers(1, 9),
    pair=st.sampled_from((8, 16, 32)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_rows_written_in_parts_are_the_rows_read(
    parts: list[int], k: int, pair: int, dtype: torch.dtype, seed: int
) -> None:
    n = sum(parts)
    plain = random(n, k, dtype, seed)
    packed = Stretch([(n, k)], dtype, pair).take(n, k)
    for begin, part in zip([sum(parts[:i]) for i in range(len(parts))], plain.split(parts), strict=True):
        packed.write(begin, part)
    assert torch.equal(packed.unpacked(), plain)
    ids = torch.randint(0, n, (7,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(packed.rows(ids), plain[ids].float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_register_of_weights_holds_the_outputs_in_order(dtype: torch.dtype) -> None:
    """Of 8 bf16 outputs the lower halves of a vector are outputs 0 to 3 and the upper ones 4 to 7."""
    packed = PackedMatrix.of(torch.arange(8, dtype=dtype)[:, None], 8)
    expected = [0, 1, 2, 3, 4, 5, 6, 7] if dtype is torch.float32 else [0, 4, 1, 5, 2, 6, 3, 7]
    assert packed.data.flatten().tolist() == expected


def test_places_beyond_the_matrix_are_zero_and_do_not_count() -> None:
    packed = PackedMatrix.of(torch.ones(9, 3), 8)
    assert packed.shape == (9, 3)
    assert packed.data.shape == (2, 3, 8)
    assert packed.data.sum() == 27
    assert packed.nbytes == 27 * 4


def test_a_stretch_gives_neighbours_and_then_memory_of_its_own() -> None:
    stretch = Stretch([(8, 2), (9, 3)], torch.float32, 8)
    first, second, third = stretch.take(8, 2), stretch.take(9, 3), stretch.take(8, 1)
    assert second.address == first.address + 8 * 2 * 4
    third.write(0, torch.ones(8, 1))
    assert first.data.sum() == second.data.sum() == 0
