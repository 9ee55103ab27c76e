"""Exercise 9.1: attention, against the engine's kernel."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm import ops


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim"),
    [(1, 1, 1, 2), (5, 2, 2, 4), (9, 6, 2, 16), (40, 9, 3, 64), (7, 4, 1, 8)],
)
def test_rows_are_those_of_the_engine(
    exercise: Exercise, rows: int, heads: int, kv_heads: int, dim: int
) -> None:
    rng = np.random.default_rng(rows)
    qkv = rng.standard_normal((rows, (heads + 2 * kv_heads) * dim)).astype(np.float32)
    out = np.full((rows, heads * dim), np.nan, np.float32)
    exercise.kernels("attention.cpp")("attention", qkv, rows, heads, kv_heads, dim, out)

    parts = qkv.reshape(rows, -1, dim).swapaxes(0, 1)
    keys, values = parts[heads : heads + kv_heads], parts[heads + kv_heads :]
    expected = ops.paged_attention(
        qkv,
        np.ascontiguousarray(keys)[None],
        np.ascontiguousarray(values)[None],
        block_tables=[[0]],
        context_len=[rows],
        query_start=[0, rows],
        num_heads=heads,
    )
    np.testing.assert_allclose(out, expected, atol=1e-5)
