"""Exercise 11.1: attention in tiles, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise

TILE = 16


@pytest.mark.parametrize(("rows", "context"), [(1, 1), (16, 16), (20, 20), (1, 33), (5, 40), (33, 50)])
@pytest.mark.parametrize("size", [1.0, 30.0, -100.0])
def test_rows(exercise: Exercise, rows: int, context: int, size: float) -> None:
    rng = np.random.default_rng(context)
    room = context + TILE
    q = (size * rng.standard_normal((rows, 64))).astype(np.float32)
    if size < 0:
        q = -abs(q)  # with keys above 0, all scores of a row are far below 0
    k, v = np.full((2, room, 64), np.nan, np.float32)
    k[:context], v[:context] = rng.standard_normal((2, context, 64))
    if size < 0:
        k = abs(k)
    out = np.full_like(q, np.nan)
    visited = np.full(-(-rows // TILE), -1, np.int32)
    exercise.kernels("flash.cu")("flash", q, k, v, out, visited, rows, context, room)

    positions = context - rows + np.arange(rows)
    scores = q.astype(np.float64) @ k[:context].astype(np.float64).T / 8
    scores[positions[:, None] < np.arange(context)] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out, weights @ v[:context], rtol=1e-3, atol=2e-4)

    last = np.minimum(np.arange(1, visited.size + 1) * TILE, rows) - 1  # row of each block
    np.testing.assert_array_equal(visited, positions[last] // TILE + 1, "tiles visited")
