"""Exercise 18.3: splits in one, against a softmax over all keys at once."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize(("splits", "dim"), [(1, 64), (5, 33), (40, 64)])
@pytest.mark.parametrize("scale", [1, 300, -300])
def test_as_if_it_had_never_been_cut(
    exercise: Exercise, splits: int, dim: int, threads: int, scale: float
) -> None:
    rng = np.random.default_rng(splits)
    rows = 4
    largest = np.full((rows, splits), -np.inf, np.float32)
    total = np.zeros((rows, splits), np.float32)
    partial = np.full((rows, splits, dim), np.nan, np.float32)
    expected = np.zeros((rows, dim))
    for n in range(rows - 1):  # the last row has seen nothing at all
        counts = rng.integers(0, 4, splits)
        counts[rng.integers(splits)] = 3
        scores = scale * rng.standard_normal(counts.sum())
        scores = scores if scale > 0 else -100 - abs(scores)  # all far below 0
        values = rng.standard_normal((counts.sum(), dim))
        weights = np.exp(scores - scores.max())
        expected[n] = weights @ values / weights.sum()
        for s, end in enumerate(np.cumsum(counts)):
            part = slice(end - counts[s], end)
            if counts[s]:
                largest[n, s] = scores[part].max()
                own = np.exp(scores[part] - largest[n, s].astype(np.float64))
                total[n, s], partial[n, s] = own.sum(), own @ values[part]
    out = np.full((rows, dim), np.nan, np.float32)
    library = exercise.kernels("merge_splits.cu")
    library("merge_splits", largest, total, partial, out, rows, splits, dim, threads)
    for n in range(rows):
        message = f"row {n}, with {(total[n] > 0).sum()} of {splits} splits that have seen a key"
        has_nan = bool(np.isnan(out[n]).any())
        assert not has_nan, f"{message}: NaN"
        np.testing.assert_allclose(out[n], expected[n], rtol=1e-3, atol=1e-4, err_msg=message)
