"""Exercise 6.2: the largest number of a row, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise


@pytest.mark.parametrize("threads", [32, 96, 1024])
@pytest.mark.parametrize("dim", [1, 33, 5000])
def test_the_first_of_the_largest_is_found(exercise: Exercise, dim: int, threads: int) -> None:
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((4, dim)).astype(np.float32)
    x[1] -= 100  # all negative
    x[2] = np.round(x[2])  # many equal ones
    x[3] = -np.inf
    value, place = np.full(4, np.nan, np.float32), np.full(4, -1, np.int32)
    exercise.kernels("row_max.cu")("row_max", x, value, place, *x.shape, threads)
    np.testing.assert_array_equal(value, x.max(axis=1))
    np.testing.assert_array_equal(place, x.argmax(axis=1))
