"""A model's norms give way to the native one only where they are the same."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from services.engine.native.kernels import Kernels, kernels
from services.engine.native.rms import NativeRmsNorm, replace_rms_norms


@pytest.fixture(scope="module")
def found() -> Kernels:
    built = kernels()
    if built is None:
        pytest.skip("no native kernels here")
    return built


class Gated(LlamaRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if gate is None else x * gate)


class Softened(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


def inside(norm: torch.nn.Module) -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """A model that has it, and where it is in there."""
    for weight in norm.parameters():
        torch.nn.init.uniform_(weight, -0.5, 1.5)
    parent = torch.nn.Sequential(norm)
    return torch.nn.Sequential(parent), parent


@pytest.mark.parametrize("width", [1, 7, 8, 9, 64, 577])
@pytest.mark.parametrize("make", [LlamaRMSNorm, Gemma3RMSNorm, torch.nn.RMSNorm])
def test_root_mean_square_norms_are_replaced_and_compute_the_same(found: Kernels, make: type, width: int) -> None:
    norm = make(width, eps=1e-5)
    model, parent = inside(norm)
    x = torch.randn((2, 5, 3, width), generator=torch.Generator().manual_seed(width))
    expected = model(x)
    assert replace_rms_norms(model, found) == 1
    assert isinstance(parent[0], NativeRmsNorm)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    turned = x.transpose(1, 2)
    torch.testing.assert_close(model(turned), norm(turned), rtol=1e-5, atol=1e-6)
    assert model(x[:, :0]).shape == (2, 0, 3, width)


@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.LayerNorm(64),
        torch.nn.LayerNorm(64, bias=False),
        Gated(64),
        Softened(64),
        torch.nn.Linear(64, 64),
        torch.nn.RMSNorm(64, elementwise_affine=False),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_what_only_looks_like_one_stays(found: Kernels, norm: torch.nn.Module) -> None:
    model, parent = inside(norm)
    assert replace_rms_norms(model, found) == 0
    assert parent[0] is norm
