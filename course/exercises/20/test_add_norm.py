"""Exercise 20.1: sum and norm in one kernel, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise

EPS = 1e-5


@pytest.mark.parametrize("threads", [32, 96, 256, 1024])
@pytest.mark.parametrize("dim", [1, 31, 576, 2049])
def test_sum_and_norm(exercise: Exercise, dim: int, threads: int) -> None:
    rng = np.random.default_rng(dim)
    x, y = rng.standard_normal((2, 4, dim)).astype(np.float32)
    y[2] = -x[2]  # a sum of zeros
    x[3], y[3] = x[3] / 300, y[3] / 300  # and one whose mean of squares is about eps
    weight = rng.standard_normal(dim).astype(np.float32)
    total = x.astype(np.float64) + y
    expected = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + EPS) * weight
    out, reads = np.full_like(x, np.nan), np.zeros(1, np.int32)
    exercise.kernels("add_norm.cu")("add_norm", y, x, weight, EPS, out, *x.shape, threads, reads)
    np.testing.assert_allclose(x, total, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert reads[0] == y.size, f"y has {y.size} numbers and was read {reads[0]} times"
