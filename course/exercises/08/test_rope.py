"""Exercise 8.1: rotary embedding, half-split, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise


@pytest.mark.parametrize("threads", [32, 100])
@pytest.mark.parametrize(("rows", "count", "dim"), [(1, 1, 2), (3, 2, 6), (7, 12, 64)])
def test_pairs_half_a_head_apart_turn(
    exercise: Exercise, rows: int, count: int, dim: int, threads: int
) -> None:
    rng = np.random.default_rng(dim)
    heads = rng.standard_normal((rows, count, dim)).astype(np.float32)
    angles = rng.uniform(0, 6, (rows, dim // 2))
    cos_sin = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)

    pairs = heads[..., : dim // 2].astype(np.float64) + 1j * heads[..., dim // 2 :]  # a rotation is a product
    turned = pairs * np.exp(1j * angles)[:, None]
    exercise.kernels("rope.cu")("rope", heads, cos_sin, rows, count, dim, threads)
    np.testing.assert_allclose(heads, np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5)
