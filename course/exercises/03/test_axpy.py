"""Exercise 3.1: a · x + y with any grid, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise

ROOM = 4096


@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (3, 32), (4, 256), (2, 1024)])
@pytest.mark.parametrize("n", [1, 31, 1000])
def test_all_numbers_and_no_others(exercise: Exercise, n: int, blocks: int, threads: int) -> None:
    rng = np.random.default_rng(n)
    x, y = rng.standard_normal((2, ROOM)).astype(np.float32)
    out = np.full(ROOM, np.nan, np.float32)
    exercise.kernels("axpy.cu")("axpy", 2.5, x, y, out, n, ROOM, blocks, threads)
    np.testing.assert_allclose(out[:n], 2.5 * x[:n] + y[:n], rtol=1e-6, atol=1e-6)
    assert np.isnan(out[n:]).all(), "numbers behind the end were written"
