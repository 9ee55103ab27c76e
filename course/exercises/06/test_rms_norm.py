"""Exercise 6.1: RMSNorm, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise

EPS = 1e-5


@pytest.mark.parametrize("threads", [32, 256, 1024])
@pytest.mark.parametrize("dim", [1, 31, 576, 2049])
def test_rows_are_normalised(exercise: Exercise, dim: int, threads: int) -> None:
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((3, dim)).astype(np.float32)
    x[1] *= 1000  # an outlier among rows
    x[2] = 0  # and a row of zeros, for which there is eps
    weight = rng.standard_normal(dim).astype(np.float32)
    out = np.full_like(x, np.nan)
    exercise.kernels("rms_norm.cu")("rms_norm", x, weight, EPS, out, *x.shape, threads)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
