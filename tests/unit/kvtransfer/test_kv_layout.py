from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from kvtransfer import Area, KvLayout, LayoutMismatch, overlapping, require_compatible
from kvtransfer.layout import overlap

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


@pytest.mark.parametrize("field", ["model", "dtype", "layers", "kv_heads", "head_dim"])
def test_what_must_agree_is_named_and_changes_the_fingerprint(field):
    changed = {"model": "n", "dtype": "fp32"}.get(field, 70)
    other = dataclasses.replace(SMOLLM2, **{field: changed})
    with pytest.raises(LayoutMismatch, match=f"differ in {field}"):
        require_compatible(SMOLLM2, other)
    assert other.fingerprint() != SMOLLM2.fingerprint()


@pytest.mark.parametrize("change", [{"block_tokens": 32}, {"layer_begin": 10}, {"head_end": 2}])
def test_block_sizes_and_shards_may_differ(change):
    other = dataclasses.replace(SMOLLM2, **change)
    require_compatible(SMOLLM2, other)
    assert other.fingerprint() == SMOLLM2.fingerprint()


def test_the_fingerprint_is_the_same_in_another_process():
    code = (
        "from kvtransfer import KvLayout;"
        "print(KvLayout(model='m', dtype='bf16', layers=30, kv_heads=3, head_dim=64, block_tokens=16).fingerprint())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == SMOLLM2.fingerprint()


def shard(layers: tuple[int, int], heads: tuple[int, int]) -> KvLayout:
    return dataclasses.replace(
        SMOLLM2, layer_begin=layers[0], layer_end=layers[1], head_begin=heads[0], head_end=heads[1]
    )


def area(layers: tuple[int, int], heads: tuple[int, int]) -> Area:
    return Area(layer_begin=layers[0], layer_end=layers[1], head_begin=heads[0], head_end=heads[1])


@pytest.mark.parametrize(
    ("layers", "heads", "common"),
    [
        ((0, 30), (0, 3), ((10, 20), (1, 3))),
        ((19, 21), (2, 3), ((19, 20), (2, 3))),
        ((0, 11), (0, 2), ((10, 11), (1, 2))),
        ((12, 13), (1, 2), ((12, 13), (1, 2))),
        ((20, 30), (1, 3), None),
        ((0, 10), (1, 3), None),
        ((10, 20), (0, 1), None),
    ],
)
def test_two_shards_have_in_common_what_both_hold(layers, heads, common):
    own, peer = shard((10, 20), (1, 3)), shard(layers, heads)
    if common:
        assert overlap(own, peer) == overlap(peer, own) == area(*common)
    else:
        with pytest.raises(LayoutMismatch, match=r"share no KV: the sender has layers \[10, 20\) × heads \[1, 3\)"):
            overlap(own, peer)


def test_a_receiver_pulls_from_the_senders_that_overlap_it():
    senders = [shard(layers, heads) for layers in ((0, 15), (15, 30)) for heads in ((0, 1), (1, 2), (2, 3))]
    assert overlapping(shard((10, 20), (1, 3)), senders) == {
        1: area((10, 15), (1, 2)),
        2: area((10, 15), (2, 3)),
        4: area((15, 20), (1, 2)),
        5: area((15, 20), (2, 3)),
    }
    assert overlapping(shard((15, 16), (0, 1)), senders) == {3: area((15, 16), (0, 1))}


def test_of_replicas_the_first_is_used():
    one, other = shard((0, 30), (0, 2)), shard((0, 30), (2, 3))
    assert list(overlapping(SMOLLM2, [one, one, other, other])) == [0, 2]
    assert list(overlapping(SMOLLM2, [one, SMOLLM2, other])) == [0, 1]


def test_senders_that_lack_a_part_of_the_receivers_shard_are_refused():
    with pytest.raises(LayoutMismatch, match="no sender has layer 7, head 2"):
        overlapping(SMOLLM2, [shard((0, 30), (0, 2)), shard((0, 7), (0, 3)), shard((8, 30), (2, 3))])
    with pytest.raises(LayoutMismatch, match="no sender has layer 0, head 0"):
        overlapping(SMOLLM2, [])
    with pytest.raises(LayoutMismatch, match="dtype"):
        overlapping(SMOLLM2, [dataclasses.replace(SMOLLM2, dtype="fp32")])


@pytest.mark.parametrize(
    "change",
    [{"dtype": "fp8"}, {"layers": 0}, {"block_tokens": 0}, {"head_dim": -1}, {"layer_end": 31}, {"head_begin": 3}],
)
def test_an_impossible_layout_is_refused(change):
    with pytest.raises(ValueError, match=r"dtype|at least 1|not within"):
        dataclasses.replace(SMOLLM2, **change)
