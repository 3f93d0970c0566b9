"""KV in one byte a value: as near as the encoding can be, and never quietly wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtransfer.codec import FP8_NUMBERS, decode, encode, fp8_codes, wire_bytes

SHAPE = (3, 2, 33, 2, 8)
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FLOAT32 = np.finfo(np.float32)
BF16_STEP = 2.0**-8  # half a step of bf16, relative


def make_kv(shape=SHAPE, *, dtype: str, seed: int = 1) -> np.ndarray:
    """Channels of very different sizes."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * 10.0 ** random.integers(-3, 3, (*shape[:2], 1, *shape[3:]))
    return stored(torch.from_numpy(values).to(TYPES[dtype]))


def stored(values: torch.Tensor) -> np.ndarray:
    return values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()


def numbers(kv: np.ndarray) -> np.ndarray:
    return (
        (torch.from_numpy(kv).view(torch.bfloat16) if kv.dtype == np.uint16 else torch.from_numpy(kv)).double().numpy()
    )


def round_trip(kv: np.ndarray, encoding) -> np.ndarray:
    size = wire_bytes(encoding, kv.shape, kv.itemsize)
    assert size < kv.nbytes
    message, target = np.full(size, 0xAA, np.uint8), np.empty_like(kv)
    source = kv.copy()
    encode(source, encoding, message)
    np.testing.assert_array_equal(source, kv)
    decode(message, encoding, target)
    return target


def test_the_table_of_e4m3_is_the_one_of_torch() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.flatnonzero(np.isnan(theirs)).tolist() == [0x7F, 0xFF]
    np.testing.assert_array_equal(FP8_NUMBERS, np.nan_to_num(theirs))


def test_e4m3_is_rounded_as_torch_rounds_it_at_every_tie_beside_every_tie_and_anywhere() -> None:
    positive = FP8_NUMBERS[:0x7F]
    ties = (positive[1:] + positive[:-1]) / 2
    beside = [np.nextafter(ties, np.float32(side)) for side in (0, np.inf)]
    random = np.random.default_rng(1)
    anywhere = (
        random.uniform(-448, 448, 20_000),
        random.standard_normal(20_000) * 2.0 ** random.integers(-16, 6, 20_000),
    )
    one_sign = np.concatenate([positive, ties, *beside, *anywhere]).astype(np.float32)
    values = np.concatenate([one_sign, -one_sign])
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(fp8_codes(values.copy()), theirs)


def test_what_is_beyond_e4m3_becomes_its_largest_number() -> None:
    values = np.array([448, 464, 465, 1e30, -1e30], np.float32)
    assert FP8_NUMBERS[fp8_codes(values)].tolist() == [448, 448, 448, 448, -448]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_int8_is_within_half_a_step_of_its_channel(dtype: str) -> None:
    kv = make_kv(dtype=dtype)
    exact, got = numbers(kv), numbers(round_trip(kv, "int8"))
    step = np.abs(exact).max(axis=2, keepdims=True) / 127
    rounding = np.abs(exact) * BF16_STEP if dtype == "bf16" else 0
    assert (np.abs(got - exact) <= step * 0.50001 + rounding).all()
    assert np.abs(got - exact).max() > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fp8_is_torchs_own_after_a_division_by_the_heads_power_of_two(dtype: str) -> None:
    kv = make_kv(dtype=dtype)
    exact = numbers(kv)
    scale = 2.0 ** np.ceil(np.log2(np.abs(exact).max(axis=(2, 4), keepdims=True) / 448))
    expected = torch.from_numpy((exact / scale).astype(np.float32)).to(torch.float8_e4m3fn).double().numpy() * scale
    np.testing.assert_array_equal(numbers(round_trip(kv, "fp8")), expected)


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, float(FLOAT32.tiny), 1.0, 3.38e38, float(FLOAT32.max)])
def test_zeros_and_the_smallest_and_largest_numbers_stay_finite_and_near(encoding, dtype: str, size: float) -> None:
    values = torch.full(SHAPE, min(size, 3.3895e38) if dtype == "bf16" else size, dtype=torch.float32)
    values[:, :, ::2] *= -1
    exact = numbers(kv := stored(values.to(TYPES[dtype])))
    got = numbers(round_trip(kv, encoding))
    assert np.isfinite(got).all()
    least = 127 * 1.2e-38  # what is less than a scale can divide by is lost
    assert (np.abs(got - exact) <= np.maximum(np.abs(exact) * 0.13, least)).all()


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_is_not_finite_arrives_as_nan_in_its_place_and_changes_nothing_beside_it(encoding, dtype: str) -> None:
    kv = make_kv(dtype=dtype)
    broken, mended = kv.copy(), kv.copy()
    places = ((0, 0, 0, 0, 0), (1, 1, 32, 1, 7), (2, 0, 5, 1, 3))
    for place, value in zip(places, (np.nan, np.inf, -np.inf), strict=True):
        broken[place] = stored(torch.tensor(value).to(TYPES[dtype]).reshape(1))[0]
        mended[place] = 0
    got, expected = numbers(round_trip(broken, encoding)), numbers(round_trip(mended, encoding))
    assert sorted(zip(*np.nonzero(np.isnan(got)), strict=True)) == sorted(places)
    for place in places:
        expected[place] = np.nan
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 15, 16, 17, 128])
def test_a_message_is_never_longer_than_plain_kv(encoding, tokens: int) -> None:
    values = 3 * 2 * tokens * 2 * 8
    scales = 3 * 2 * 2 * (8 if encoding == "int8" else 1)
    shape = (3, 2, tokens, 2, 8)
    for width in (2, 4):
        assert wire_bytes("plain", shape, width) == values * width
        assert wire_bytes(encoding, shape, width) == min(values * width, values + 4 * scales)
    assert (wire_bytes("int8", shape, 2) < 2 * values) == (tokens > 4)
