"""Exercise 7.2: a product in tiles, against numpy, and how much it read."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (16, 16, 16), (5, 33, 70), (40, 17, 100), (32, 48, 15)])
def test_products(exercise: Exercise, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m)
    behind = 17 * max(n, k)
    x, weight, out = (np.full(size + behind, np.nan, np.float32) for size in (m * k, n * k, m * n))
    x[: m * k], weight[: n * k] = rng.standard_normal(m * k), rng.standard_normal(n * k)
    reads = np.zeros(2, np.int32)
    exercise.kernels("tiled.cu")("tiled", x, weight, out, m, n, k, behind, reads)
    expected = x[: m * k].reshape(m, k) @ weight[: n * k].reshape(n, k).T
    np.testing.assert_allclose(out[: m * n].reshape(m, n), expected, rtol=1e-4, atol=1e-4)
    assert np.isnan(out[m * n :]).all(), "numbers behind the end were written"
    tiles_down, tiles_across = -(-m // 16), -(-n // 16)
    assert reads[0] <= m * k * tiles_across, f"x was read {reads[0]} times"
    assert reads[1] <= n * k * tiles_down, f"the weight was read {reads[1]} times"
