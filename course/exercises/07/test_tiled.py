"""Exercise 7.2: a product in tiles, against numpy, and how much it read."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (16, 16, 16), (5, 33, 70), (40, 17, 100), (32, 48, 15)])
def test_products(exercise: Exercise, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m)
    x, weight = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((n, k)).astype(np.float32)
    out, reads = np.full((m, n), np.nan, np.float32), np.zeros(2, np.int32)
    exercise.kernels("tiled.cu")("tiled", x, weight, out, m, n, k, reads)
    np.testing.assert_allclose(out, x @ weight.T, rtol=1e-4, atol=1e-4)
    tiles_down, tiles_across = -(-m // 16), -(-n // 16)
    assert reads[0] <= x.size * tiles_across, f"x was read {reads[0]} times"
    assert reads[1] <= weight.size * tiles_down, f"the weight was read {reads[1]} times"
