"""What the ops should compute: numpy in float64, rounded only where an op rounds (cpp/backend/backend.h)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tiny_vllm import ops

Array = Any
BFLOAT16 = ops.bfloat16
FLOAT32 = np.dtype(np.float32)

# Distance of 1 to the next number of the type, and what an exact result near zero may be off by.
EPSILON = {BFLOAT16: 2.0**-7, FLOAT32: 2.0**-23}
ABSOLUTE = {BFLOAT16: 1e-30, FLOAT32: 1e-30}


def random(seed: int, shape: tuple[int, ...], dtype: Any, outliers: bool = True) -> Array:
    """Normal numbers, one in a hundred of them a hundred times as large."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if outliers:
        x = np.where(rng.random(shape) < 0.01, 100 * x, x)
    return x.astype(dtype)


def wide(x: Array) -> Array:
    return np.asarray(x).astype(np.float64)


def rounded(x: Array, dtype: Any) -> Array:
    """To the type and back; by way of float32, as the engine gets there."""
    return wide(x.astype(np.float32).astype(dtype))


def assert_close(
    result: Array, expected: Array, dtype: Any, *, ulps: float = 1.0, magnitude: Array | float = 0.0
) -> None:
    """|result - expected| <= ulps * |expected| * eps(dtype) + what float32 sums of `magnitude` may lose.

    magnitude: the sum of the absolute values of what was added up; its rounding errors do not shrink when the
    sum does.
    """
    expected = wide(expected)
    assert result.shape == expected.shape
    assert expected.size == 0 or np.isfinite(expected).all(), "the reference itself is broken"
    dtype = np.dtype(dtype)
    allowed = ulps * np.abs(expected) * EPSILON[dtype] + ABSOLUTE[dtype] + magnitude * 4 * EPSILON[FLOAT32]
    error = np.abs(wide(result) - expected)
    if not (error <= allowed).all():  # NaN fails too
        excess = np.where(np.isnan(error), np.inf, error - allowed)
        worst = np.unravel_index(np.argmax(excess), error.shape)
        raise AssertionError(
            f"at {worst}: {wide(result)[worst]!r}, expected {expected[worst]!r} "
            f"+- {np.broadcast_to(allowed, error.shape)[worst]:.3g}; "
            f"{(excess > 0).sum()} of {error.size} are off"
        )


def assert_same_bits(a: Array, b: Array) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    bits = np.uint16 if a.dtype == BFLOAT16 else np.uint32
    same = a.view(bits) == b.view(bits)
    assert same.all(), f"{(~same).sum()} of {same.size} differ, the first at {np.argwhere(~same)[0]}"


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """HF's order: the normalised row is rounded, then the product with the weight."""
    rows = wide(x)
    normal = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + eps)
    return rounded(rounded(normal, x.dtype) * wide(weight), x.dtype)


def act_mul(gate_up: Array, activation: str) -> Array:
    gate, up = np.split(wide(gate_up), 2, axis=1)
    if activation == "silu":
        with np.errstate(over="ignore"):
            activated = gate / (1 + np.exp(-gate))
    elif activation == "gelu":
        activated = 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
    else:
        activated = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return rounded(rounded(activated, gate_up.dtype) * up, gate_up.dtype)


def rope(heads: Array, cos_sin: Array) -> Array:
    """heads (T, n, Dh), cos_sin (T, Dh/2, 2): element i turns with element i + Dh/2."""
    cos, sin = wide(cos_sin)[:, None, :, 0], wide(cos_sin)[:, None, :, 1]
    a, b = np.split(wide(heads), 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def angles(positions: Sequence[int], head_dim: int, theta: float = 10000.0) -> Array:
    """cos_sin (T, Dh/2, 2) of plain rotary embedding."""
    turns = np.outer(positions, theta ** (-np.arange(0, head_dim, 2) / head_dim))
    return np.stack([np.cos(turns), np.sin(turns)], axis=-1).astype(np.float32)


@dataclass
class AttentionCase:
    """One step of attention: requests with some context, whose last `new` tokens are the queries."""

    heads: tuple[int, int]  # H, Hk
    head_dim: int
    block_size: int
    requests: list[tuple[int, int]]  # (context_len, new tokens)
    dtype: Any = BFLOAT16
    window: int = 0
    scale: float | None = None
    seed: int = 0
    query_size: float = 1.0

    def __post_init__(self) -> None:
        """Keys and values of each request side by side, and the same in a cache whose other slots are NaN."""
        num_heads, kv_heads = self.heads
        rng = np.random.default_rng(self.seed)
        tokens = sum(new for _, new in self.requests)
        self.qkv = np.full((tokens, (num_heads + 2 * kv_heads) * self.head_dim), np.nan).astype(self.dtype)
        queries = self.query_size * rng.standard_normal((tokens, num_heads * self.head_dim))
        self.qkv[:, : num_heads * self.head_dim] = queries.astype(self.dtype)
        self.keys = [self._random(rng, context) for context, _ in self.requests]
        self.values = [self._random(rng, context) for context, _ in self.requests]
        self.query_start = np.cumsum([0] + [new for _, new in self.requests])
        self.context_len = np.array([context for context, _ in self.requests])
        self.page(self.block_size)

    def _random(self, rng: np.random.Generator, context: int) -> Array:
        return rng.standard_normal((context, self.heads[1], self.head_dim)).astype(self.dtype)

    def page(self, block_size: int) -> None:
        """Lays keys and values out in blocks, in any order, with unused blocks in between and at the end."""
        self.block_size = block_size
        needed = [-(-context // block_size) for context, _ in self.requests]
        rng = np.random.default_rng(self.seed + 1)
        blocks = rng.permutation(sum(needed) + 3)
        shape = (blocks.size, self.heads[1], block_size, self.head_dim)
        self.key_cache = np.full(shape, np.nan).astype(self.dtype)
        self.value_cache = np.full(shape, np.nan).astype(self.dtype)
        self.block_tables = np.full((len(needed), max(needed, default=0) + 2), -1, np.int32)
        for r, count in enumerate(needed):
            self.block_tables[r, :count], blocks = blocks[:count], blocks[count:]
            for position in range(len(self.keys[r])):
                block = self.block_tables[r, position // block_size]
                self.key_cache[block, :, position % block_size] = self.keys[r][position]
                self.value_cache[block, :, position % block_size] = self.values[r][position]

    def run(self, **options: Any) -> Array:
        return ops.paged_attention(
            self.qkv,
            self.key_cache,
            self.value_cache,
            block_tables=self.block_tables,
            context_len=self.context_len,
            query_start=self.query_start,
            num_heads=self.heads[0],
            scale=self.scale,
            sliding_window=self.window,
            **options,
        )

    def expected(self, absolute_values: bool = False) -> Array:
        """(T, H·Dh), the plain way: all scores of a row, softmax, weighted mean.

        With absolute_values, the mean of the values' sizes.
        """
        num_heads, kv_heads = self.heads
        scale = 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        out = np.zeros((self.qkv.shape[0], num_heads, self.head_dim))
        queries = wide(self.qkv[:, : num_heads * self.head_dim]).reshape(-1, num_heads, self.head_dim)
        for r, (context, new) in enumerate(self.requests):
            for i in range(new):
                row, position = int(self.query_start[r]) + i, context - new + i
                oldest = max(0, position - self.window + 1) if self.window else 0
                for head in range(num_heads):
                    kv = head * kv_heads // num_heads
                    keys = wide(self.keys[r][oldest : position + 1, kv])
                    if len(keys) == 0:
                        continue
                    scores = keys @ queries[row, head] * scale
                    weights = np.exp(scores - scores.max())
                    values = wide(self.values[r][oldest : position + 1, kv])
                    out[row, head] = weights / weights.sum() @ (np.abs(values) if absolute_values else values)
        return out.reshape(len(out), -1)
