"""The native kernels against float64 arithmetic over random shapes, and what happens where they cannot be had."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.native import build
from services.engine.native.check import disagreement
from services.engine.native.kernels import Kernels, kernels
from services.engine.native.packed import PackedMatrix

BLOCK = 16
DTYPES = (torch.float32, torch.bfloat16)
EDGES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1)


@pytest.fixture(scope="module")
def found() -> Kernels:
    kernel = kernels()
    assert kernel is not None, "a C++ compiler is needed to test the native kernels"
    return kernel


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.abs().max()) or 1.0
    assert float((got.double() - expected).abs().max()) / scale < 1e-5


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 20),
    n=st.integers(1, 70),
    k=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    add=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_is_that_of_float64(
    found: Kernels, rows: int, n: int, k: int, dtype: torch.dtype, biased: bool, add: bool, seed: int
) -> None:
    x, weight = random(rows, k, seed=seed), random(n, k, seed=seed + 1).to(dtype)
    bias = random(n, seed=seed + 2) if biased else None
    out = random(rows, n, seed=seed + 3)
    expected = (
        x.double() @ weight.double().T + (bias.double() if bias is not None else 0) + (out.double() if add else 0)
    )
    found.linear(x, PackedMatrix.of(weight, found.pair), bias, out, add=add)
    assert float((out.double() - expected).abs().max()) < 1e-5 * k**0.5 * 10


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 70),
    n=st.integers(1, 70),
    k=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    add=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_row_has_the_same_product_bit_by_bit_whatever_rows_come_with_it(
    found: Kernels, rows: int, n: int, k: int, dtype: torch.dtype, add: bool, seed: int
) -> None:
    x, weight = random(rows, k, seed=seed), PackedMatrix.of(random(n, k, seed=seed + 1).to(dtype), found.pair)
    together = random(rows, n, seed=seed + 2)
    alone = together.clone()
    found.linear(x, weight, None, together, add=add)
    for row in range(rows):
        found.linear(x[row : row + 1], weight, None, alone[row : row + 1], add=add)
    assert torch.equal(together, alone)


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 4), n=st.integers(16, 70), scale=st.sampled_from((0.1, 3.0, 1e3)), seed=st.integers(0, 99))
def test_a_gate_is_that_of_float64(found: Kernels, rows: int, n: int, scale: float, seed: int) -> None:
    x, out = random(rows, 2 * n, seed=seed) * scale, torch.empty(rows, n)
    gate, up = x.double().chunk(2, dim=1)
    found.silu_gate(x, out)
    close(out, gate * gate.sigmoid() * up)


@settings(deadline=None, max_examples=60)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    dim=st.sampled_from((32, 64, 96, 128, 256)),
    lengths=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(1, 100)), min_size=1, max_size=5),
    window=st.sampled_from((0, 1, 7, BLOCK, 40)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_attention_is_that_of_float64_and_reads_no_other_slot(
    found: Kernels,
    kv_heads: int,
    group: int,
    dim: int,
    lengths: list[int],
    window: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Blocks in random order in an arena full of NaN: a slot that does not belong to the sequence spoils the result."""
    counts = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed))[: sum(counts)]
    keys, values = torch.full((2, sum(counts) + 2, BLOCK, kv_heads, dim), torch.nan, dtype=dtype)
    heads = kv_heads * group
    query = random(len(lengths), heads + 2, dim, seed=seed)[:, :heads]  # rows lie apart
    out, starts = torch.empty(len(lengths), heads, dim), []
    expected = []
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table = order[first : first + count]
        starts.append(first)
        first += count
        kv = random(2, length, kv_heads, dim, seed=seed + row + 1).to(dtype)
        for which, arena in enumerate((keys, values)):
            flat = torch.full((count * BLOCK, kv_heads, dim), torch.nan, dtype=dtype)
            flat[:length] = kv[which]
            if window:
                flat[: max(0, length - window)] = torch.nan
            arena[table] = flat.view(count, BLOCK, kv_heads, dim)
        seen = kv[:, max(0, length - window) if window else 0 :].double().repeat_interleave(group, dim=2)
        weights = torch.softmax(torch.einsum("hd,thd->ht", query[row].double(), seen[0]) * 0.2, dim=1)
        expected.append(torch.einsum("ht,thd->hd", weights, seen[1]))
    found.attend(
        query,
        keys,
        values,
        order.contiguous(),
        torch.tensor(starts),
        torch.tensor(lengths),
        out,
        window=window,
        scale=0.2,
    )
    close(out, torch.stack(expected))


def test_a_sequence_of_no_tokens_attends_to_nothing(found: Kernels) -> None:
    keys, values = torch.full((2, 1, BLOCK, 1, 32), torch.nan)
    out = torch.full((1, 1, 32), torch.nan)
    zero = torch.tensor([0])
    found.attend(torch.ones(1, 1, 32), keys, values, zero, zero, zero, out, window=0, scale=1.0)
    assert torch.equal(out, torch.zeros(1, 1, 32))


def test_large_scores_do_not_overflow(found: Kernels) -> None:
    keys = torch.stack([torch.full((1, 32), 100.0), torch.full((1, 32), -100.0)])[None]
    values = torch.stack([torch.full((1, 32), 3.0), torch.full((1, 32), 5.0)])[None]
    out = torch.empty(1, 1, 32)
    tables, starts, lengths = torch.tensor([0]), torch.tensor([0]), torch.tensor([2])
    found.attend(torch.full((1, 1, 32), 10.0), keys, values, tables, starts, lengths, out, window=0, scale=1.0)
    assert torch.equal(out, torch.full((1, 1, 32), 3.0))


def test_bf16_keys_are_rounded_to_nearest_even_like_torch_does(found: Kernels) -> None:
    bits = torch.arange(0, 1 << 16, dtype=torch.int32) << 16
    halves = torch.cat([(bits + low).view(torch.float32) for low in (0, 0x7FFF, 0x8000, 0x8001)])
    rows = halves[halves.isfinite()][: 32 * 7000].view(-1, 32)
    qkv = torch.cat((torch.zeros_like(rows), rows, rows), dim=1).contiguous()
    keys, values = torch.zeros(2, len(rows), 1, 1, 32, dtype=torch.bfloat16)
    one, zero = torch.ones(len(rows), 16), torch.zeros(len(rows), 16)
    found.place(qkv, one, zero, torch.arange(len(rows)), keys, values, 1)
    assert torch.equal(values.view(-1, 32), rows.to(torch.bfloat16))


def test_without_a_compiler_there_are_no_kernels_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert kernels.__wrapped__() is None
    assert "no C++ compiler" in caplog.text


def test_a_source_that_does_not_compile_is_a_warning_with_the_compilers_first_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    source = tmp_path / "kernels.cpp"
    source.write_text("this is no C++;\n")
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert kernels.__wrapped__() is None
    assert "do not compile" in caplog.text
    assert not list((tmp_path / "diptych" / "native").glob("*"))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("sums[r][1] += second * value", "sums[r][1] += second * 1.0001f * value"),
        ("begin = window && end > window ? end - window : 0", "begin = 0"),
        ("head[i + half] = b * c[i] + a * s[i]", "head[i + half] = b * c[i] - a * s[i]"),
        ("sqrtf(total / n + epsilon)", "sqrtf(total / n)"),
    ],
)
def test_kernels_that_compute_wrong_numbers_are_refused_loudly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, right: str, wrong: str
) -> None:
    text = build.SOURCE.read_text()
    assert right in text
    source = tmp_path / "kernels.cpp"
    source.write_text(text.replace(right, wrong))
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.ERROR):
        assert kernels.__wrapped__() is None
    assert "compute wrong numbers" in caplog.text


def test_the_check_passes_and_the_library_is_built_once(found: Kernels) -> None:
    assert disagreement(found) is None
    assert build.library() == build.library()
