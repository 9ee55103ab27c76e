"""Exercise 14.1: attention with a cache.

KvCache(num_kv_heads, head_dim, capacity)
cache.attend(q, k, v) -> (T, H, Dh): the next T rows of the text. Each sees all rows before it and itself.

q (T, H, Dh), k and v (T, Hk, Dh), float32, already rotated. H is a multiple of Hk, and query head h reads
KV head h // (H / Hk) (chapter 9). Scores are scaled by 1 / sqrt(Dh). T is any number from 1 on, another one
in each call. Keys and values of earlier calls are not given again: the cache must have its own copies, for
the caller uses his arrays again. More than `capacity` rows in all are a ValueError, and then nothing is kept
of the call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any


class KvCache:
    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int) -> None:
        self.keys = np.zeros((capacity, num_kv_heads, head_dim), np.float32)
        self.values = np.zeros_like(self.keys)
        self.length = 0

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        rows, heads, dim = q.shape
        first, end = self.length, self.length + rows
        if end > len(self.keys):
            raise ValueError(f"{end} rows, but there is room for {len(self.keys)}")
        self.keys[first:end], self.values[first:end] = k, v  # copies
        self.length = end

        shared = heads // k.shape[1]
        keys = np.repeat(self.keys[:end], shared, axis=1)  # (end, H, Dh)
        values = np.repeat(self.values[:end], shared, axis=1)
        scores = np.einsum("thd,shd->hts", q, keys) / np.sqrt(dim)
        later = np.arange(end) > first + np.arange(rows)[:, None]  # row t stands at first + t
        scores[:, later] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return np.einsum("hts,shd->thd", weights, values).astype(np.float32)
