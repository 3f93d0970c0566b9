"""What was to be expected of a link, and what of it is too little."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtransfer import probe, rdma_devices, shortfall


@pytest.mark.parametrize(
    ("lanes", "cuda", "devices"),
    [
        ("tcp/lo", True, ()),
        ("tcp/eth0", False, ("mlx5_0",)),
        ("tcp/eth0,tcp/eth1", True, ("mlx5_0", "mlx5_1")),
        ("cuda_copy/cuda,tcp/eth0", True, ()),
        ("self/memory,tcp/lo", True, ()),
    ],
)
def test_tcp_alone_beside_a_gpu_or_an_rdma_device_is_too_little_and_named(lanes, cuda, devices):
    said = shortfall(lanes, cuda=cuda, rdma_devices=devices)
    assert said is not None and lanes in said
    assert ("a GPU" in said) == cuda
    assert all(device in said for device in devices)


@pytest.mark.parametrize(
    ("lanes", "cuda", "devices"),
    [
        ("tcp/lo", False, ()),
        ("memory", True, ("mlx5_0",)),
        ("rc_mlx5/mlx5_0:1", True, ("mlx5_0",)),
        ("dc_mlx5/mlx5_0:1,tcp/eth0", False, ("mlx5_0",)),
        ("rc_verbs/mlx5_0:1,tcp/eth0", True, ("mlx5_0",)),
        ("cuda_copy/cuda,cuda_ipc/cuda,tcp/lo", True, ()),
        ("ud_verbs/rxe0:1", False, ("rxe0",)),
    ],
)
def test_what_is_all_that_was_to_be_had_is_no_shortfall(lanes, cuda, devices):
    assert shortfall(lanes, cuda=cuda, rdma_devices=devices) is None


def test_rdma_devices_are_those_that_the_system_lists(tmp_path: Path):
    assert rdma_devices(tmp_path / "missing") == ()
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert rdma_devices(tmp_path) == ("mlx5_0", "mlx5_1")


def test_the_pattern_differs_at_every_place_and_in_every_probe():
    first, second = (np.frombuffer(probe._pattern(seed), np.uint64) for seed in (1 << 40, (1 << 40) + (1 << 16)))
    assert len(np.unique(first)) == len(first) == probe.PIECE_BYTES // 8
    assert not (first == second).any()
    assert not (first == 0).any()
