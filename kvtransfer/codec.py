"""KV in fewer bytes: one byte for each value, and float32 scales. Pure NumPy, mostly without the GIL.

A piece (layers, 2, tokens, heads, head_dim) of bf16 (as uint16) or fp32 becomes its scales, then its codes in the
piece's own order:

- int8: one scale for each channel (layer, K or V, head, dim), the largest of its absolute values over 127; a code is
  the nearest multiple. Keys have channels that are tens of times larger than the others: a scale that channels share
  would leave little of the small ones.
- fp8: e4m3 (4 bits of exponent, 3 of mantissa, no infinities: OCP 8-bit floating point specification, 2023), rounded to
  nearest, ties to even, after a division by one scale for each (layer, K or V, head): the least power of two that
  brings its largest absolute value to at most 448. A float is as precise at every size: on SmolLM2's KV of
  real text the error is 2.6 % with scales of heads and of channels alike (int8: 0.4 % of K and 0.7 % of V with scales
  of channels, 1.5 % and 1.3 % with those of heads). By a power of two a bf16 number is scaled without rounding.

Finite values stay finite. An infinity or a NaN arrives as a NaN, in its own place, and does not touch its channel's
scale: KV that is broken must look so, and nothing beside it may change.

A piece whose scales would cost more than its codes save (a few tokens) travels plain; the size says which it is.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

Encoding = Literal["plain", "int8", "fp8"]

T = TypeVar("T", bound=np.generic)
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Shape = tuple[int, int, int, int, int]
"""(layers, 2, tokens, heads, head_dim)"""

_SCALE_BYTES: Final = 4
_NOT_FINITE: Final = {"int8": 0x80, "fp8": 0x7F}
"""Codes of no finite value: −128, and e4m3's NaN."""
_TILE_VALUES: Final = 1 << 16
"""Few NumPy calls for a short piece, and no more memory than a cache has."""
_INT8_LARGEST: Final = np.float32(127)
_LEAST_SCALE: Final = np.finfo(np.float32).tiny
"""A channel of zeros, or of less than float32 can divide by, has this one."""
_MOST_SCALE: Final = np.nextafter(np.finfo(np.float32).max / _INT8_LARGEST, np.float32(0))
"""127 times this is still a float32."""
_FP8_EXPONENTS: Final = (-126, 119)
"""Of scales whose inverse, and whose 448-fold, is a float32."""
_FP8_LARGEST: Final = np.float32(448)
_FP8_NORMAL: Final = np.float32(2.0**-6)
"""e4m3 below this is a multiple of 2⁻⁹."""
_FP8_MAGIC: Final = np.float32(2.0**14)
"""Floats from here on are multiples of 2⁻⁹: adding it rounds to one, and leaves how many in the lowest bits."""
_FP8_REBIAS: Final = np.uint32((127 - 7) << 23)


def wire_bytes(encoding: Encoding, shape: Shape, element_bytes: int) -> int:
    """Bytes of a piece's message. Both sides compute it; never more than those of the plain piece."""
    values = math.prod(shape)
    if encoding == "plain":
        return values * element_bytes
    return min(values * element_bytes, values + _SCALE_BYTES * math.prod(_scale_shape(encoding, shape)))


def encode(kv: npt.NDArray[np.generic], encoding: Encoding, message: Codes) -> None:
    """Writes the message of `kv`, a piece as uint16 (bf16) or float32. `message` has its `wire_bytes`, which are fewer
    than those of the piece; its first byte lies at a multiple of 4.
    """
    scales, codes = _parts(message, encoding, cast("Shape", kv.shape))
    for plane, plane_scales, plane_codes in zip(*_tiles(kv, scales, codes), strict=True):
        values = _to_float32(plane)
        largest, broken = _largest(values, encoding)
        if encoding == "int8":
            plane_scales[...] = np.clip(largest / _INT8_LARGEST, _LEAST_SCALE, _MOST_SCALE)
            values *= np.float32(1) / plane_scales
            plane_codes[...] = np.rint(values, out=values).astype(np.int8).view(np.uint8)
        else:
            exponents = np.frexp(largest / _FP8_LARGEST)[1].clip(*_FP8_EXPONENTS)
            plane_scales[...] = np.ldexp(np.float32(1), exponents)
            values *= np.float32(1) / plane_scales
            narrow = plane.dtype == np.uint16  # the lower half of each value is zeros then
            plane_codes[...] = (
                np.take(_bf16_codes(), values.view(np.uint16)[..., 1::2]) if narrow else fp8_codes(values)
            )
        if broken is not None:
            plane_codes[broken] = _NOT_FINITE[encoding]


def decode(message: Codes, encoding: Encoding, kv: npt.NDArray[np.generic]) -> None:
    """Writes the piece of a message made by `encode` over `kv`, of the same shape and type."""
    scales, codes = _parts(message, encoding, cast("Shape", kv.shape))
    for plane, plane_scales, plane_codes in zip(*_tiles(kv, scales, codes), strict=True):
        if encoding == "int8":
            values = plane_codes.view(np.int8).astype(np.float32)
        else:
            values = np.take(FP8_NUMBERS, plane_codes)
        values *= plane_scales
        broken = plane_codes == _NOT_FINITE[encoding]
        if broken.any():
            values[broken] = np.nan
        _from_float32(values, plane)


def _scale_shape(encoding: Encoding, shape: Shape) -> Shape:
    """One token's, for one scale a channel; and one dim's, for one scale a head."""
    layers, two, _, heads, dim = shape
    return layers, two, 1, heads, dim if encoding == "int8" else 1


def _parts(message: Codes, encoding: Encoding, shape: Shape) -> tuple[Floats, Codes]:
    """Views of the scales and of the codes."""
    scale_shape = _scale_shape(encoding, shape)
    end = _SCALE_BYTES * math.prod(scale_shape)
    return message[:end].view(np.float32).reshape(scale_shape), message[end:].reshape(shape)


def _tiles(kv: npt.NDArray[T], scales: Floats, codes: Codes) -> tuple[list[npt.NDArray[T]], list[Floats], list[Codes]]:
    """Views (planes, tokens, heads, dim), a plane being a layer's K or V: so many at a time as a cache has room for."""
    planes = kv.shape[0] * kv.shape[1]
    each = max(1, _TILE_VALUES * planes // max(1, kv.size))
    begins = range(0, planes, each)
    return (
        [kv.reshape(planes, *kv.shape[2:])[begin : begin + each] for begin in begins],
        [scales.reshape(planes, *scales.shape[2:])[begin : begin + each] for begin in begins],
        [codes.reshape(planes, *codes.shape[2:])[begin : begin + each] for begin in begins],
    )


def _largest(values: Floats, encoding: Encoding) -> tuple[Floats, npt.NDArray[np.bool_] | None]:
    """Largest absolute value under each scale, and where `values` were not finite: those become zeros."""
    broken = None
    largest = _largest_of(values, encoding)
    if not np.isfinite(largest).all():
        broken = ~np.isfinite(values)
        values[broken] = 0.0
        largest = _largest_of(values, encoding)
    return largest, broken


def _largest_of(values: Floats, encoding: Encoding) -> Floats:
    largest = np.maximum(values.max(axis=1, keepdims=True), -values.min(axis=1, keepdims=True))
    return cast("Floats", largest if encoding == "int8" else largest.max(axis=3, keepdims=True))


def _to_float32(plane: npt.NDArray[np.generic]) -> Floats:
    """A copy."""
    if plane.dtype == np.float32:
        return plane.astype(np.float32)
    return (plane.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _from_float32(values: Floats, plane: npt.NDArray[np.generic]) -> None:
    """As they are, or rounded to the nearest bf16, ties to even; `values` are spent."""
    if plane.dtype == np.float32:
        plane[...] = values
        return
    bits = values.view(np.uint32)
    odd = bits >> np.uint32(16)
    odd &= np.uint32(1)
    bits += np.uint32(0x7FFF)
    bits += odd
    bits >>= np.uint32(16)
    plane[...] = bits


def fp8_codes(values: Floats) -> Codes:
    """The nearest e4m3 numbers, ties to even; 448 for what is beyond it. `values` are finite, and spent."""
    bits = values.view(np.uint32)
    signs = (bits >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)
    np.minimum(np.abs(values, out=values), _FP8_LARGEST, out=values)
    small = values < _FP8_NORMAL
    few = (values + _FP8_MAGIC).view(np.uint32) - _FP8_MAGIC.view(np.uint32)
    odd = bits >> np.uint32(20) & np.uint32(1)
    bits += odd + np.uint32(0x7FFFF) - _FP8_REBIAS  # modulo 2³²
    bits >>= np.uint32(20)
    return cast("Codes", np.where(small, few, bits).astype(np.uint8) | signs)


@cache
def _bf16_codes() -> Codes:
    """The code of each bf16 number. Those of no finite one are never asked for."""
    numbers = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    return fp8_codes(np.nan_to_num(numbers))


def _fp8_numbers() -> Floats:
    """The number of each code; the two NaNs are zeros here."""
    numbers = np.zeros(256, np.float32)
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        numbers[code], numbers[code | 0x80] = value, -value
    return numbers


FP8_NUMBERS: Final = _fp8_numbers()
