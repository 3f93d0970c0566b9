"""The native root mean square norm in place of a transformers model's own, which are ten small steps in Python."""

from __future__ import annotations

import inspect

import torch

from services.engine.native.kernels import Kernels

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_TOLERANCE = 1e-5  # relative, of float32 sums in another order


class NativeRmsNorm(torch.nn.Module):
    """Takes the place of a norm in a model whose arithmetic is float32."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self._kernels, self._weight, self._epsilon = kernels, weight.detach().float().contiguous(), epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., n) to (..., n): x / sqrt(mean(x²) + epsilon) · weight."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        self._kernels.rms_norm(rows, self._weight, self._epsilon, out)
        return out.view(x.shape)


@torch.inference_mode()
def replace_rms_norms(module: torch.nn.Module, kernels: Kernels) -> int:
    """Replaces the norms of `module` that are shown by trial to be root mean square norms; returns how many.

    What looks like one and computes something else stays. The model's arithmetic must be float32.
    """
    found = [
        (parent, name, native)
        for parent in module.modules()
        for name, child in parent.named_children()
        if (native := _native(child, kernels)) is not None
    ]
    for parent, name, native in found:
        setattr(parent, name, native)
    return len(found)


def _native(module: torch.nn.Module, kernels: Kernels) -> NativeRmsNorm | None:
    """The same by the kernel, or None where `module` is something else. Gemma's norms multiply by 1 + weight."""
    epsilon = next((value for name in _EPSILONS if isinstance(value := vars(module).get(name), float)), None)
    weights = dict(module.named_parameters())
    if epsilon is None or list(weights) != ["weight"] or weights["weight"].dim() != 1:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    weight = weights["weight"]
    # Values whose mean is not 0 (a norm that subtracts it differs), also so small that epsilon matters.
    x = torch.linspace(-1, 2, 3 * len(weight)).sin().view(3, -1) * torch.tensor([[1.0], [1e-3], [1e2]])
    expected = module(x)
    for factor in (weight, 1 + weight):
        native = NativeRmsNorm(kernels, factor, epsilon)
        if torch.allclose(native(x), expected, rtol=_TOLERANCE, atol=0.0):
            return native
    return None
