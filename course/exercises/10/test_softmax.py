"""Exercise 10.3: softmax of rows on a GPU (or what plays one), against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise


@pytest.mark.parametrize("threads", [32, 96, 512])
@pytest.mark.parametrize("n", [1, 40, 1000])
def test_rows(exercise: Exercise, n: int, threads: int) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((6, n)).astype(np.float32)
    x[1] *= 1000
    x[2] -= 5000
    x[3, : n // 2] = -np.inf  # whole warps see hidden keys only
    x[4, n // 2 + 1 :] = -np.inf
    x[5] = -np.inf
    out = np.full_like(x, np.nan)
    exercise.kernels("softmax.cu")("softmax", x, out, *x.shape, threads)
    wide = x[:5].astype(np.float64)
    e = np.exp(wide - wide.max(axis=1, keepdims=True))
    np.testing.assert_allclose(out[:5], e / e.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(out[5], np.zeros(n))
