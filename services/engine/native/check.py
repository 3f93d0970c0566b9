"""The kernels against float64 arithmetic, on a few small shapes: enough to catch a wrong compiler or instruction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.engine.native.packed import PackedMatrix

if TYPE_CHECKING:
    from services.engine.native.kernels import Kernels

_TOLERANCE = 1e-5  # relative to the largest number of a result; float32 sums of some hundred products stay far below
_DTYPES = (torch.float32, torch.bfloat16)


def disagreement(kernels: Kernels) -> str | None:
    """Names a kernel that computes something else than float64 arithmetic does, and by how much; None: all agree."""
    generator = torch.Generator().manual_seed(1)
    for dtype in _DTYPES:
        for name, difference in (
            ("linear", _linear(kernels, dtype, generator)),
            ("attend", _attend(kernels, dtype, generator)),
            ("place", _place(kernels, dtype, generator)),
        ):
            if not difference <= _TOLERANCE:  # NaN is a disagreement, too
                return f"{name} of {dtype} by {difference:.2g}"
    for name, difference in (
        ("rms_norm", _rms_norm(kernels, generator)),
        ("silu_gate", _silu_gate(kernels, generator)),
    ):
        if not difference <= _TOLERANCE:
            return f"{name} by {difference:.2g}"
    return None


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max())


def _linear(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> float:
    worst = 0.0
    for rows in (1, 6, 7, 11):
        x, bias = torch.randn(rows, 149, generator=generator), torch.randn(69, generator=generator)
        weight = torch.randn(69, 149, generator=generator).to(dtype)
        out = torch.randn(rows, 69, generator=generator)
        expected = out.double() + x.double() @ weight.double().T + bias.double()
        kernels.linear(x, PackedMatrix.of(weight, kernels.pair), bias, out, add=True)
        worst = max(worst, _difference(out, expected))
    return worst


def _attend(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> float:
    """Two sequences of 1 and 21 tokens, 6 heads over 2, blocks of 4 tokens in no order."""
    dim = 2 * kernels.pair
    keys, values = torch.randn(2, 9, 4, 2, dim, generator=generator).to(dtype)
    query = torch.randn(2, 6, dim, generator=generator)
    tables, starts, lengths = torch.tensor([8, 5, 0, 1, 2, 7, 3]), torch.tensor([0, 1]), torch.tensor([1, 21])
    worst = 0.0
    for window in (0, 7):
        out = torch.empty_like(query)
        kernels.attend(query, keys, values, tables, starts, lengths, out, window=window, scale=0.3)
        for row in range(2):
            blocks = tables[int(starts[row]) :]
            seen = slice(max(0, int(lengths[row]) - window) if window else 0, int(lengths[row]))
            k = keys[blocks].flatten(0, 1)[seen].double().repeat_interleave(3, dim=1)
            v = values[blocks].flatten(0, 1)[seen].double().repeat_interleave(3, dim=1)
            weights = torch.softmax(torch.einsum("hd,thd->ht", query[row].double(), k) * 0.3, dim=1)
            worst = max(worst, _difference(out[row], torch.einsum("ht,thd->hd", weights, v)))
    return worst


def _place(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> float:
    qkv = torch.randn(2, (3 + 2) * 8, generator=generator)
    angles = torch.randn(2, 4, generator=generator)
    keys, values = torch.zeros(2, 2, 4, 1, 8, dtype=dtype)
    given = qkv.double().view(2, 5, 8)
    a, b = given[:, :4, :4], given[:, :4, 4:]
    cosine, sine = angles.double().cos()[:, None], angles.double().sin()[:, None]
    rotated = torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=2)
    kernels.place(qkv, angles.cos(), angles.sin(), torch.tensor([5, 2]), keys, values, 3)
    written = torch.stack((keys.view(8, 8)[[5, 2]], values.view(8, 8)[[5, 2]]), dim=1)
    expected = torch.stack((rotated[:, 3], given[:, 4]), dim=1)
    if dtype is torch.bfloat16:  # rounding is the kernel's own; half a unit in the last place of it is allowed
        off = float(((written.double() - expected).abs() / expected.abs()).max())
        return _difference(qkv.view(2, 5, 8)[:, :4], rotated) if off <= 2**-8 else off
    return max(_difference(qkv.view(2, 5, 8)[:, :4], rotated), _difference(written, expected))


def _rms_norm(kernels: Kernels, generator: torch.Generator) -> float:
    x, weight = torch.randn(3, 2 * 37, generator=generator), torch.randn(37, generator=generator)
    wide = x.double().view(3, 2, 37)
    expected = wide / (wide.square().mean(dim=2, keepdim=True) + 0.1).sqrt() * weight.double()
    kernels.rms_norm(x, weight, 0.1, x, groups=2)
    return _difference(x.view(3, 2, 37), expected)


def _silu_gate(kernels: Kernels, generator: torch.Generator) -> float:
    x, out = torch.randn(3, 2 * 37, generator=generator) * 20, torch.empty(3, 37)
    gate, up = x.double().chunk(2, dim=1)
    kernels.silu_gate(x, out)
    return _difference(out, gate * gate.sigmoid() * up)
