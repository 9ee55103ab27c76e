"""Exercise 7.3: a product with one row, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise


@pytest.mark.parametrize("threads", [32, 96, 256])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 31), (10, 576), (33, 1000)])
def test_one_row(exercise: Exercise, n: int, k: int, threads: int) -> None:
    rng = np.random.default_rng(n)
    room = n + threads // 32
    weight = rng.standard_normal((room, k)).astype(np.float32)
    x, out = rng.standard_normal(k).astype(np.float32), np.full(room, np.nan, np.float32)
    exercise.kernels("gemv.cu")("gemv", weight, x, out, n, room, k, threads)
    np.testing.assert_allclose(out[:n], weight[:n] @ x, rtol=1e-4, atol=1e-4)
    assert np.isnan(out[n:]).all(), "numbers behind the end were written"
