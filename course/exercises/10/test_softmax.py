"""Exercise 10.3: softmax of rows on a GPU (or what plays one), against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise


# The longest rows first: what they leave in shared memory is there when a shorter row has fewer numbers.
@pytest.mark.parametrize("threads", [32, 96, 1024])
@pytest.mark.parametrize("n", [1000, 40, 1])
def test_rows(exercise: Exercise, n: int, threads: int) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((6, n)).astype(np.float32)
    rows = (
        "all hidden",
        "size 1000",
        "around -5000",
        "the first half hidden",
        "the last half hidden",
        "size 1",
    )
    x[0] = -np.inf
    x[1] *= 1000
    x[2] -= 5000
    x[3, : n // 2] = -np.inf  # whole warps see hidden keys only
    x[4, n // 2 + 1 :] = -np.inf
    out = np.full_like(x, np.nan)
    exercise.kernels("softmax.cu")("softmax", x, out, *x.shape, threads)
    np.testing.assert_array_equal(out[0], np.zeros(n), rows[0])
    wide = x[1:].astype(np.float64)
    e = np.exp(wide - wide.max(axis=1, keepdims=True))
    for name, found, wanted in zip(rows[1:], out[1:], e / e.sum(axis=1, keepdims=True), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7, err_msg=f"scores: {name}")
