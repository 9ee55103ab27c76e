"""Exercise 2.2: a dot product of bfloat16, against exact sums and, bit for bit, against the engine."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm import ops


def dots(exercise: Exercise, a: Any, b: Any) -> Any:
    out = np.zeros(len(a), np.float32)
    bits = [np.ascontiguousarray(x).view(np.uint16) for x in (a, b)]
    exercise.kernels("dot.cpp")("dot_rows", *bits, out, *a.shape)
    return out


@pytest.mark.parametrize("n", [0, 1, 255, 257, 4096, 65536, 1 << 20])
def test_ones_are_counted(exercise: Exercise, n: int) -> None:
    ones = np.ones((1, n), ml_dtypes.bfloat16)
    assert float(dots(exercise, ones, ones)[0]) == n


def test_the_sums_are_float32(exercise: Exercise) -> None:
    a = np.random.default_rng(5).uniform(0.5, 1, (100, 700)).astype(ml_dtypes.bfloat16)
    exact = (a.astype(np.float64) ** 2).sum(axis=1)
    error = np.abs(dots(exercise, a, a).astype(np.float64) / exact - 1)
    assert error.max() < 1e-6


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 576, 1000])
def test_the_bits_are_those_of_the_engine(exercise: Exercise, n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = (rng.standard_normal((200, n)).astype(ml_dtypes.bfloat16) for _ in range(2))
    engine = [
        ops.matmul(a[i : i + 1], b[i : i + 1], out_dtype=np.float32, isa="portable")[0] for i in range(len(a))
    ]
    np.testing.assert_array_equal(
        dots(exercise, a, b).view(np.uint32), np.concatenate(engine).view(np.uint32)
    )
