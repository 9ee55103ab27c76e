"""Exercise 2.1: rounding to bfloat16, against ml_dtypes, on all patterns that can go wrong."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import Exercise

UPPER = np.arange(65536, dtype=np.uint32)


def rounded(exercise: Exercise, words: Any) -> Any:
    x = words.astype(np.uint32).view(np.float32)
    out = np.zeros(x.size, np.uint16)
    exercise.kernels("bfloat16.cpp")("round_all", x, out, x.size)
    return x, out.view(ml_dtypes.bfloat16)


def test_widening_is_exact(exercise: Exercise) -> None:
    bits = UPPER.astype(np.uint16)
    out = np.zeros(bits.size, np.float32)
    exercise.kernels("bfloat16.cpp")("widen", bits, out, bits.size)
    np.testing.assert_array_equal(out.view(np.uint32), UPPER << 16)


@pytest.mark.parametrize("lower", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_upper_half_with_this_lower_half(exercise: Exercise, lower: int) -> None:
    x, out = rounded(exercise, UPPER << 16 | np.uint32(lower))
    is_nan = np.isnan(x)
    expected = x[~is_nan].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(out[~is_nan].view(np.uint16), expected.view(np.uint16))
    assert np.isnan(out[is_nan].astype(np.float32)).all()


def test_the_nan_with_most_bits_stays_nan(exercise: Exercise) -> None:
    _, out = rounded(exercise, np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF]))
    assert np.isnan(out.astype(np.float32)).all()


def test_the_mean_of_many_stays(exercise: Exercise) -> None:
    x = np.random.default_rng(1).uniform(1, 2, 100_000).astype(np.float32)
    _, out = rounded(exercise, x.view(np.uint32))
    assert abs(out.astype(np.float64).mean() / x.mean(dtype=np.float64) - 1) < 1e-4
