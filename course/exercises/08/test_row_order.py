"""Exercise 8.3: re-ordered and rotated half-split, the scores are those of the interleaved rotation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm import ops


def scores(q: Any, k: Any) -> Any:
    """(heads, T, T) of q and k (T, heads, Dh)."""
    return np.einsum("thd,shd->hts", q, k)


def interleaved(heads: Any, angles: Any) -> Any:
    turned = (heads[..., 0::2] + 1j * heads[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(heads.shape)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 4), (3, 64)])
def test_scores_do_not_change(exercise: Exercise, num_heads: int, head_dim: int) -> None:
    rng = np.random.default_rng(num_heads)
    tokens, width = 5, num_heads * head_dim
    x = rng.standard_normal((tokens, 16)).astype(np.float32)
    wq, wk = rng.standard_normal((2, width, 16)).astype(np.float32)
    angles = rng.uniform(0, 6, (tokens, head_dim // 2))
    q, k = ((x @ w.T).reshape(tokens, num_heads, head_dim) for w in (wq, wk))
    expected = scores(interleaved(q, angles), interleaved(k, angles))

    order = exercise.python("row_order.py").order(num_heads, head_dim)
    assert sorted(order) == list(range(width)), "each row once"
    qkv = np.concatenate([x @ wq[order].T, x @ wk[order].T, np.zeros((tokens, width), np.float32)], axis=1)
    room = np.zeros((1, num_heads, tokens, head_dim), np.float32)
    cos_sin = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    rotated, keys, _ = ops.rope_and_cache(
        qkv, room, room, slot_mapping=range(tokens), cos_sin=cos_sin, num_heads=num_heads
    )
    found = scores(rotated[:, :width].reshape(tokens, num_heads, head_dim), keys[0].swapaxes(0, 1))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
