"""Exercise 6.2: the largest number of a row, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise


# The longest rows first: what they leave in shared memory is there when a shorter row has fewer numbers.
@pytest.mark.parametrize("threads", [32, 96, 1024])
@pytest.mark.parametrize("dim", [5000, 33, 1])
def test_the_first_of_the_largest_is_found(exercise: Exercise, dim: int, threads: int) -> None:
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((4, dim)).astype(np.float32)
    rows = ("-infinity", "negative numbers", "many equal numbers", "some numbers")
    x[0] = -np.inf
    x[1] -= 100
    x[2] = np.round(x[2])
    value, place = np.full(4, np.nan, np.float32), np.full(4, -1, np.int32)
    exercise.kernels("row_max.cu")("row_max", x, value, place, *x.shape, threads)
    for row, name in enumerate(rows):
        assert value[row] == x[row].max(), f"the value, of a row of {name}"
        assert place[row] == x[row].argmax(), f"the place, of a row of {name}"
