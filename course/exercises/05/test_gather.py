"""Exercise 5.1: rows of a table, against numpy, and a row that lies behind 2^31 numbers."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest
from conftest import Exercise

MAP_NORESERVE = 0x4000


@pytest.mark.parametrize("threads", [1, 32, 100, 1024])
@pytest.mark.parametrize("dim", [1, 33, 576])
def test_rows(exercise: Exercise, dim: int, threads: int) -> None:
    rng = np.random.default_rng(dim)
    table = rng.integers(1, 1 << 16, (50, dim)).astype(np.uint16)
    ids = np.array([0, 49, 7, 7, -1, 50, -(2**31), 2**31 - 1], np.int32)
    out = np.full((ids.size, dim), 0xFFFF, np.uint16)
    exercise.kernels("gather.cu")("gather", table, ids, out, len(table), ids.size, dim, threads)
    for i, row in zip(ids.tolist(), out, strict=True):
        wanted = table[i] if 0 <= i < len(table) else np.zeros(dim, np.uint16)
        np.testing.assert_array_equal(row, wanted, f"id {i} of a table with {len(table)} rows")


@pytest.mark.skipif(sys.platform != "linux", reason="wants memory that is promised and never used")
def test_a_row_behind_2_to_the_31_numbers(exercise: Exercise) -> None:
    if exercise.device == "cuda":
        pytest.skip("the table would have to be copied to the GPU: 4.7 GB")
    vocab, dim = 262_144, 8960
    table_bytes = 2 * vocab * dim
    before = 1 << 32  # bytes of zeros where an offset of 32 bits may lead, so that nothing crashes
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, before + table_bytes, flags=flags)
    except OSError:
        pytest.skip("this system promises no more memory than it has")
    numbers = np.frombuffer(memory, np.uint16)
    rows = np.arange(1, 2 * dim + 1, dtype=np.uint16).reshape(2, dim)
    first = before // 2
    numbers[first : first + dim] = rows[0]
    numbers[first + (vocab - 1) * dim : first + vocab * dim] = rows[1]
    ids, out = np.array([0, vocab - 1], np.int32), np.zeros((2, dim), np.uint16)
    table = ctypes.c_void_p(numbers.ctypes.data + before)
    exercise.kernels("gather.cu")("gather", table, ids, out, vocab, 2, dim, 256)
    for i, row, wanted in zip(ids.tolist(), out, rows, strict=True):
        np.testing.assert_array_equal(row, wanted, f"id {i}, whose row begins at number {i * dim:,}")
