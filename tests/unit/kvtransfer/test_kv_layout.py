from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from kvtransfer import KvLayout, LayoutMismatch, require_compatible

SMOLLM2 = KvLayout(model="m", dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=16)


def test_bytes_follow_from_the_counts():
    assert SMOLLM2.token_bytes == 23_040
    assert SMOLLM2.block_bytes == 16 * 23_040
    assert dataclasses.replace(SMOLLM2, dtype="fp32").token_bytes == 46_080


def test_a_shard_counts_only_its_own():
    shard = dataclasses.replace(SMOLLM2, layer_begin=10, layer_end=20, head_begin=1, head_end=3)
    assert shard.token_bytes == 10 * 2 * 2 * 64 * 2


def test_an_end_of_zero_means_to_the_last():
    assert (SMOLLM2.layer_end, SMOLLM2.head_end) == (30, 3)
    assert dataclasses.replace(SMOLLM2, layer_end=0, head_end=0) == SMOLLM2


@pytest.mark.parametrize("field", ["model", "dtype", "layers", "kv_heads", "head_dim", "layer_begin", "head_begin"])
def test_what_must_agree_is_named_and_changes_the_fingerprint(field):
    changed = {"model": "n", "dtype": "fp32", "layer_begin": 1, "head_begin": 1}.get(field, 70)
    other = dataclasses.replace(SMOLLM2, **{field: changed})
    with pytest.raises(LayoutMismatch, match=f"differ in {field}"):
        require_compatible(SMOLLM2, other)
    assert other.fingerprint() != SMOLLM2.fingerprint()


def test_block_sizes_may_differ():
    other = dataclasses.replace(SMOLLM2, block_tokens=32)
    require_compatible(SMOLLM2, other)
    assert other.fingerprint() == SMOLLM2.fingerprint()


def test_the_fingerprint_is_the_same_in_another_process():
    code = (
        "from kvtransfer import KvLayout;"
        "print(KvLayout(model='m', dtype='bf16', layers=30, kv_heads=3, head_dim=64, block_tokens=16).fingerprint())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == SMOLLM2.fingerprint()


@pytest.mark.parametrize(
    "change",
    [{"dtype": "fp8"}, {"layers": 0}, {"block_tokens": 0}, {"head_dim": -1}, {"layer_end": 31}, {"head_begin": 3}],
)
def test_an_impossible_layout_is_refused(change):
    with pytest.raises(ValueError, match=r"dtype|at least 1|not within"):
        dataclasses.replace(SMOLLM2, **change)
