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

Array = Any


class KvCache:
    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int) -> None:
        raise NotImplementedError("Your turn")

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        raise NotImplementedError("Your turn")
