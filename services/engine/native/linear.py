"""x · Wᵀ by the native kernel, and how it takes the place of torch's in a model."""

from __future__ import annotations

from pathlib import Path

import torch

from services.engine.native.kernels import Kernels
from services.engine.native.memory import Stretch
from services.engine.native.packed import PackedMatrix

FEW_ROWS = 48
"""Up to here the kernel wins also where the CPU multiplies bf16 in hardware: few rows wait for the memory."""


class Linear:
    """All matrix products of one model. Results are float32, and the kernel's arithmetic, too.

    Where the CPU multiplies bf16 in hardware, products of many rows go there: x is rounded to the weights' bf16.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._narrow = cpu_has_bf16()

    def __call__(self, x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (rows, k) · weight (n, k)ᵀ + bias (n,), for contiguous x."""
        if self._is_narrow(x, weight):
            out = torch.mm(x.to(weight.dtype), weight.unpacked().t()).float()
            return out if bias is None else out.add_(bias)
        out = torch.empty((x.shape[0], weight.shape[0]))
        self._kernels.linear(x, weight, bias, out)
        return out

    def add(self, total: torch.Tensor, x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None = None) -> None:
        """total (rows, n) += x (rows, k) · weight (n, k)ᵀ + bias (n,), for contiguous x and total."""
        if self._is_narrow(x, weight):
            total.add_(self(x, weight, bias))
        else:
            self._kernels.linear(x, weight, bias, total, add=True)

    def _is_narrow(self, x: torch.Tensor, weight: PackedMatrix) -> bool:
        return self._narrow and x.shape[0] > FEW_ROWS and weight.dtype is torch.bfloat16


class StreamingLinear(torch.nn.Module):
    """Takes the place of an nn.Linear in a transformers model whose arithmetic is float32."""

    def __init__(self, linear: Linear, weight: PackedMatrix, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._linear, self._weight, self._bias = linear, weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., k) to (..., n)."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._linear(rows, self._weight, self._bias).view(*x.shape[:-1], self._weight.shape[0])


def stream_linears(module: torch.nn.Module, kernels: Kernels, dtype: torch.dtype) -> int:
    """Replaces every nn.Linear of `module` whose weights are `dtype`; returns the bytes of the new ones' weights."""
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear and child.weight.dtype is dtype
    ]
    stretch = Stretch(((child.out_features, child.in_features) for _, _, child in found), dtype, kernels.pair)
    linear = Linear(kernels)
    for parent, name, child in found:
        weight = stretch.take(child.out_features, child.in_features)
        weight.write(0, child.weight.detach())
        bias = None if child.bias is None else child.bias.detach().float()
        setattr(parent, name, StreamingLinear(linear, weight, bias))
    return sum(child.weight.nbytes for _, _, child in found)


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 in hardware; unknown counts as no."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return False
    flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())
