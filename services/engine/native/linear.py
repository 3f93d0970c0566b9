"""x · Wᵀ for few rows and for many: the streaming kernel while the memory decides, matrix multiplication beyond."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from services.engine.native.kernels import Kernels
from services.engine.native.memory import Stretch

FEW_ROWS = 48
"""Up to here the streaming kernel wins: measured, with bf16 weights (`python -m loadtest engine`)."""

_SCRATCH_NUMBERS = 4 << 20
"""Of the scratch memory. A LM head, say, is widened in several parts."""


class Linear:
    """All matrix products of one model. Results and arithmetic are float32.

    Products of many rows need both sides in one precision. Where the CPU multiplies bf16 in hardware, x is rounded to
    the weights' bf16; elsewhere the weights are widened, a matrix or less at a time, into memory they all share.
    """

    def __init__(self, kernels: Kernels, weights: Sequence[torch.Tensor]) -> None:
        """`weights`: all matrices that will come."""
        self._kernels = kernels
        self._narrow = cpu_has_bf16()
        self._widest = max((weight.numel() for weight in weights if weight.dtype is not torch.float32), default=0)
        self._scratch: torch.Tensor | None = None  # made when first needed: a decode worker may never

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (rows, k) · weight (n, k)ᵀ + bias (n,), for contiguous x."""
        if x.shape[0] <= FEW_ROWS:
            out = torch.empty((x.shape[0], weight.shape[0]))
            self._kernels.linear(x, weight, bias, out)
            return out
        out = self._multiply(x, weight)
        return out if bias is None else out.add_(bias)

    def add(self, total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """total (rows, n) += x (rows, k) · weight (n, k)ᵀ + bias (n,), for contiguous x and total."""
        if x.shape[0] <= FEW_ROWS:
            self._kernels.linear(x, weight, bias, total, add=True)
        else:
            total.add_(self(x, weight, bias))

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype is torch.float32:
            return torch.mm(x, weight.t())
        if self._narrow:
            return torch.mm(x.to(weight.dtype), weight.t()).float()
        if self._scratch is None:
            self._scratch = torch.empty(min(self._widest, _SCRATCH_NUMBERS))
        n, k = weight.shape
        rows = max(1, len(self._scratch) // k)
        if n <= rows:
            return torch.mm(x, self._scratch[: n * k].view(n, k).copy_(weight).t())
        out = torch.empty((len(x), n))
        for begin in range(0, n, rows):
            part = weight[begin : begin + rows]
            wide = self._scratch[: part.numel()].view_as(part).copy_(part)
            out[:, begin : begin + rows] = torch.mm(x, wide.t())
        return out


class StreamingLinear(torch.nn.Module):
    """Takes the place of an nn.Linear in a transformers model whose arithmetic is float32."""

    def __init__(self, linear: Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
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
    stretch = Stretch(sum(child.weight.numel() for _, _, child in found), dtype)
    linear = Linear(kernels, [child.weight for _, _, child in found])
    for parent, name, child in found:
        weight = stretch.take(*child.weight.shape).copy_(child.weight.detach())
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
