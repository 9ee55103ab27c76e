"""Exercise 7.1: the calls, given to a product that reads its memory as cuBLAS does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Exercise

SIZES = [(1, 1, 1), (3, 5, 7), (4, 4, 4), (8, 2, 6)]


def gemm(call: Any, x: Any, weight: Any, out: Any) -> None:
    """C (m x n) = op(A) · op(B), column after column. Refuses what cuBLAS refuses, and overruns."""
    memory = {"x": x.ravel(), "weight": weight.ravel()}

    def element(name: str, op: str, ld: int, rows: int, columns: int, i: int, j: int) -> Any:
        if op == "T":
            rows, columns, i, j = columns, rows, j, i
        assert op in "NT", "op is N or T"
        assert ld >= rows, f"the leading dimension {ld} of {name} is less than a column of {rows}"
        assert i + j * ld < memory[name].size, f"{name} is read behind its end"
        return memory[name][i + j * ld]

    assert call.ldc >= call.m, f"the leading dimension {call.ldc} of C is less than a column of {call.m}"
    for j in range(call.n):
        for i in range(call.m):
            total = sum(
                element(call.a, call.op_a, call.lda, call.m, call.k, i, p)
                * element(call.b, call.op_b, call.ldb, call.k, call.n, p, j)
                for p in range(call.k)
            )
            out.reshape(-1)[i + j * call.ldc] = total


def numbers(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).integers(-9, 10, shape).astype(np.float64)


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_weight_rows(exercise: Exercise, m: int, n: int, k: int) -> None:
    x, weight, out = numbers(m, k), numbers(n, k), np.full((m, n), np.nan)
    gemm(exercise.python("cublas_calls.py").with_weight_rows(m, n, k), x, weight, out)
    np.testing.assert_array_equal(out, x @ weight.T)


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_weight_columns(exercise: Exercise, m: int, n: int, k: int) -> None:
    x, weight, out = numbers(m, k), numbers(k, n), np.full((m, n), np.nan)
    gemm(exercise.python("cublas_calls.py").with_weight_columns(m, n, k), x, weight, out)
    np.testing.assert_array_equal(out, x @ weight)


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_part_of_rows(exercise: Exercise, m: int, n: int, k: int) -> None:
    x, weight, out = numbers(m, k + 3), numbers(n, k), np.full((m, n), np.nan)
    gemm(exercise.python("cublas_calls.py").with_part_of_rows(m, n, k, k + 3), x, weight, out)
    np.testing.assert_array_equal(out, x[:, :k] @ weight.T)
