"""The GPU's index arithmetic on the CPU: as a NumPy twin, and as the kernels' own source, taken by a C++ compiler."""

from __future__ import annotations

import ctypes
import dataclasses
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import packing_twin
import pytest

from kvtransfer import Arena, KvLayout, packing, plan_pieces

# What CUDA has and C++ has not; threads run one after the other.
SHIM = """
#define __global__
#define __device__ static
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static struct { unsigned x; } blockIdx, blockDim, threadIdx, gridDim;
"""
LAUNCH = """
extern "C" void launch(int scatters, unsigned grid, unsigned block, UNIT* arena, UNIT* packed, const int* table,
                       const long long* n) {
    gridDim.x = grid, blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x)
            (scatters ? scatter(arena, packed, table, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8])
                      : gather(arena, packed, table, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8]));
}
"""
BLOCK, BLOCKS = 16, 12
TOKENS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 100)


class Compiled:
    """The kernels of one unit, with the twin's signature."""

    def __init__(self, layout: KvLayout, folder: Path) -> None:
        compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
        assert compiler is not None, "a C++ compiler is needed to test the kernels"
        unit = packing.unit_bytes(layout)
        file, library = folder / f"kernels{unit}.cpp", folder / f"kernels{unit}.so"
        file.write_text(SHIM + packing.source(layout) + LAUNCH.replace("UNIT", packing.UNITS[unit]))
        command = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", str(file), "-o", str(library)]
        subprocess.run(command, check=True, timeout=60)
        self._launch = ctypes.CDLL(str(library)).launch

    def gather(self, arena, packed, table, *numbers: int) -> None:
        self._run(0, arena, packed, table, numbers)

    def scatter(self, arena, packed, table, *numbers: int) -> None:
        self._run(1, arena, packed, table, numbers)

    def _run(self, scatters: int, arena, packed, table, numbers) -> None:
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (arena, packed, table)]
        self._launch(scatters, 3, 32, *pointers, (ctypes.c_longlong * len(numbers))(*numbers))


def layout_of(head_dim: int, dtype: str) -> KvLayout:
    return KvLayout(model="m", dtype=dtype, layers=5, kv_heads=4, head_dim=head_dim, block_tokens=BLOCK)


@pytest.fixture(scope="module", params=[(1, "bf16"), (3, "fp32"), (4, "bf16"), (64, "bf16")], ids=str)
def layout(request) -> KvLayout:
    """Units of 2, 4, 8 and 16 bytes."""
    return layout_of(*request.param)


@pytest.fixture(scope="module", params=["twin", "compiled"])
def kernels(request, layout, tmp_path_factory):
    return packing_twin if request.param == "twin" else Compiled(layout, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "unit"),
    [(1, "bf16", 2), (3, "fp32", 4), (4, "bf16", 8), (64, "bf16", 16), (80, "bf16", 16), (100, "bf16", 8)],
)
def test_a_unit_is_the_widest_that_divides_a_head(head_dim, dtype, unit):
    assert packing.unit_bytes(layout_of(head_dim, dtype)) == unit


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("skip", [0, 1, BLOCK])
@pytest.mark.parametrize(
    "cut", [{}, {"layer_begin": 1, "layer_end": 4, "head_begin": 1, "head_end": 3}, {"head_begin": 3}]
)
def test_kernels_do_what_slices_do(layout, kernels, tokens, skip, cut):
    """From a whole model to a shard with other blocks: ranges of layers, heads and tokens of an arena, and back."""
    shard = dataclasses.replace(layout, block_tokens=24, **cut)
    draw, numbers = random.Random(tokens), np.random.default_rng(tokens)
    arena, twin = Arena(layout, BLOCKS), Arena(layout, BLOCKS)
    arena.array.view(np.uint8)[...] = numbers.integers(0, 256, arena.array.view(np.uint8).shape)
    blocks = draw.sample(range(BLOCKS), 7)
    for piece in plan_pieces(layout, shard, tokens, min(skip, tokens)):
        message, expected = arena.staging(piece.bytes), arena.staging(piece.bytes)
        arena.gather(piece, blocks, expected)
        move(kernels.gather, arena, piece, blocks, message)
        np.testing.assert_array_equal(message, expected)
        message[...] = numbers.integers(0, 256, piece.bytes)
        arena.scatter(piece, blocks, message)
        twin.array[...] = arena.array
        arena.scatter(piece, blocks, expected)
        move(kernels.scatter, twin, piece, blocks, expected)
        np.testing.assert_array_equal(twin.array.view(np.uint8), arena.array.view(np.uint8))


def move(kernel, arena: Arena, piece, blocks, message) -> None:
    """As the CUDA backend calls a kernel."""
    units = np.dtype(f"V{packing.unit_bytes(arena.layout)}")
    table = packing.block_table(arena.layout, arena.blocks, piece, blocks)
    numbers = packing.geometry(arena.layout, arena.blocks, piece).numbers
    kernel(arena.array.reshape(-1).view(units), message.view(units), table, *numbers)


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_block_outside_of_the_arena_never_reaches_a_kernel(block):
    layout = layout_of(4, "bf16")
    (piece,) = plan_pieces(layout, layout, 2 * BLOCK, BLOCK)
    assert packing.block_table(layout, BLOCKS, piece, [block, 3]).tolist() == [3]
    with pytest.raises(ValueError, match=r"not within \[0, 12\)"):
        packing.block_table(layout, BLOCKS, piece, [3, block])
