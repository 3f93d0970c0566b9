"""kernels.cpp for torch tensors: one method for each function of it, and the check before first use."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from services.engine.native.build import library
from services.engine.native.packed import PackedMatrix

log = logging.getLogger(__name__)

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_LINEAR = [_POINTER] * 4 + [_INT] * 4
_ATTEND = [_POINTER, _LONG] + [_POINTER] * 6 + [_INT] * 5 + [_LONG, _FLOAT]
_PLACE = [_POINTER] * 6 + [_INT] * 4
_RMS_NORM = [_POINTER] * 3 + [_INT, _LONG, _LONG, _INT, _INT, _FLOAT]
_SILU_GATE = [_POINTER] * 2 + [_INT] * 2
_LAYERS = [_POINTER] * 8 + [_INT] * 8 + [_FLOAT] * 2

Function = Callable[..., None]


class LayerTable:
    """Where the weights and the KV of a model's layers are, for Kernels.layers. Keeps what it points to.

    Matrices are packed in `dtype`, the KV's type, too; norms and biases are float32, None where the model has none.
    """

    Row = tuple[PackedMatrix | torch.Tensor | None, ...]

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        dim: int,
        inner: int,
        block_tokens: int,
        epsilon: float,
        scale: float,
    ) -> None:
        """`rows`: the members of `Layer` in kernels.cpp, in its order, for each layer."""
        self._rows = rows
        self._pointers = np.array([[_address(each) for each in row] for row in rows], np.uint64)
        self.address: int = self._pointers.ctypes.data
        self.count = len(rows)
        self.dtype, self.heads, self.kv_heads, self.dim = dtype, heads, kv_heads, dim
        self.inner, self.block_tokens, self.epsilon, self.scale = inner, block_tokens, epsilon, scale


class Kernels:
    """Calls into the library. Tensors are contiguous and on the CPU unless said otherwise; float32 but for weights and
    KV, which are float32 or bfloat16. Not checked at each call: the caller prepares them once.
    """

    def __init__(self, path: Path) -> None:
        found = ctypes.CDLL(str(path))
        self._linear = {dtype: _function(found, f"linear_{name}", _LINEAR) for dtype, name in _SUFFIX.items()}
        self._attend = {dtype: _function(found, f"attend_{name}", _ATTEND) for dtype, name in _SUFFIX.items()}
        self._place = {dtype: _function(found, f"place_{name}", _PLACE) for dtype, name in _SUFFIX.items()}
        self._layers = {dtype: _function(found, f"layers_{name}", _LAYERS) for dtype, name in _SUFFIX.items()}
        self._rms_norm = _function(found, "rms_norm", _RMS_NORM)
        self._silu_gate = _function(found, "silu_gate", _SILU_GATE)
        self.pair = ctypes.c_int.in_dll(found, "pair").value
        """Outputs side by side in a PackedMatrix. `attend` takes head dimensions that are a multiple of this."""

    def linear(
        self, x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None, out: torch.Tensor, *, add: bool = False
    ) -> None:
        """out (rows, n) = x (rows, k) · weight (n, k)ᵀ + bias (n,), or += with `add`. A row's result is the same,
        bit by bit, whatever rows come with it.
        """
        n, k = weight.shape
        self._linear[weight.dtype](
            x.data_ptr(),
            weight.address,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            n,
            k,
            add,
        )

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        *,
        window: int,
        scale: float,
    ) -> None:
        """Attention of one token for each sequence, into out (rows, heads, dim).

        query (rows, heads, dim), rows may lie apart; keys and values (blocks, block_tokens, kv_heads, dim) of one
        layer; the blocks of sequence i are tables[starts[i]:], int64, and its token sees the last `window` (0: all)
        of lengths[i] positions, its own included, which must be at least one.
        """
        rows, heads, dim = query.shape
        _, block_tokens, kv_heads, _ = keys.shape
        self._attend[keys.dtype](
            query.data_ptr(), query.stride(0), keys.data_ptr(), values.data_ptr(), tables.data_ptr(), starts.data_ptr(),
            lengths.data_ptr(), out.data_ptr(), rows, heads, kv_heads, dim, block_tokens, window, scale,
        )  # fmt: skip

    def place(
        self,
        qkv: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: int,
    ) -> None:
        """Rotates queries and keys of qkv (rows, (heads + 2 · kv_heads) · dim) in place, and writes keys and values to
        their slots (rows,) of one layer's keys and values (blocks, block_tokens, kv_heads, dim).

        cosine, sine: (rows, dim / 2).
        """
        _, _, kv_heads, dim = keys.shape
        self._place[keys.dtype](
            qkv.data_ptr(), cosine.data_ptr(), sine.data_ptr(), slots.data_ptr(), keys.data_ptr(), values.data_ptr(),
            qkv.shape[0], heads, kv_heads, dim,
        )  # fmt: skip

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor, *, groups: int = 1
    ) -> None:
        """Root mean square norm of the first `groups` runs of weight's length in each row; rows may lie apart, and out
        may be x.
        """
        self._rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.stride(0),
            out.stride(0),
            groups,
            weight.shape[0],
            epsilon,
        )

    def silu_gate(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out (rows, n) = silu(x[:, :n]) ⊙ x[:, n:]; n is at least pair / 2."""
        self._silu_gate(x.data_ptr(), out.data_ptr(), *out.shape)

    def layers(
        self,
        x: torch.Tensor,
        layers: LayerTable,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        slots: torch.Tensor,
        tables: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        """All layers of a Llama-shaped model for one token of each sequence: x (rows, hidden) in place.

        slots as in `place`; tables, starts and lengths as in `attend`.
        """
        self._layers[layers.dtype](
            x.data_ptr(), layers.address, cosine.data_ptr(), sine.data_ptr(), slots.data_ptr(), tables.data_ptr(),
            starts.data_ptr(), lengths.data_ptr(), layers.count, *x.shape, layers.heads, layers.kv_heads, layers.dim,
            layers.inner, layers.block_tokens, layers.epsilon, layers.scale,
        )  # fmt: skip


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, when they can be built here and agree with float64 arithmetic; else None, after a warning."""
    path = library()
    if path is None:
        return None
    try:
        found = Kernels(path)
    except (OSError, ValueError, AttributeError) as error:
        log.warning("the native kernels cannot be loaded (%s): decode steps run on torch's slower kernels", error)
        return None
    from services.engine.native.check import disagreement

    wrong = disagreement(found)
    if wrong:
        log.error("the native kernels compute wrong numbers (%s): decode steps run on torch's slower kernels", wrong)
        return None
    return found


def _address(each: PackedMatrix | torch.Tensor | None) -> int:
    if each is None:
        return 0
    return each.address if isinstance(each, PackedMatrix) else each.data_ptr()


def _function(found: ctypes.CDLL, name: str, arguments: Sequence[type]) -> Function:
    """The library exports pointers to its functions."""
    address = ctypes.c_void_p.in_dll(found, name).value
    if not address:
        raise AttributeError(f"{name} is empty")
    return ctypes.CFUNCTYPE(None, *arguments)(address)
