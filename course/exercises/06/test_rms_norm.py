"""Exercise 6.1: RMSNorm, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise

EPS = 1e-5


# The longest rows first: what they leave in shared memory is there when a shorter row has fewer numbers.
@pytest.mark.parametrize("threads", [32, 96, 256, 1024])
@pytest.mark.parametrize("dim", [2049, 576, 31, 1])
def test_rows_are_normalised(exercise: Exercise, dim: int, threads: int) -> None:
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((4, dim)).astype(np.float32)
    x[0] = 0  # a row of zeros, for which there is eps
    x[1] *= 1000  # an outlier among rows
    x[2] *= 0.001  # and one where eps is most of the mean
    weight = rng.standard_normal(dim).astype(np.float32)
    out = np.full_like(x, np.nan)
    exercise.kernels("rms_norm.cu")("rms_norm", x, weight, EPS, out, *x.shape, threads)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * weight
    for name, found, wanted in zip(
        ("zeros", "large numbers", "small numbers", "some numbers"), out, expected, strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=f"a row of {name}")
