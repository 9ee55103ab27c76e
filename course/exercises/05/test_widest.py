"""Exercise 5.2: the width of a load, by trying every row."""

from __future__ import annotations

import pytest
from conftest import Exercise


@pytest.mark.parametrize(
    ("address", "row_bytes", "expected", "loads"),
    [
        (0, 1152, 16, 72),  # the small model: 576 numbers of bfloat16
        (256, 4100, 4, 1025),
        (256, 2050, 2, 1025),
        (264, 1152, 8, 144),  # a table that begins in the middle of 16 bytes
        (257, 1152, 1, 1152),
        (256, 24, 8, 3),  # the second row begins at 280
        (256, 7, 1, 7),
    ],
)
def test_tables(exercise: Exercise, address: int, row_bytes: int, expected: int, loads: int) -> None:
    module = exercise.python("widest.py")
    assert module.widest_load(address, row_bytes) == expected
    assert module.loads_of_a_row(address, row_bytes) == loads


def test_no_row_is_misaligned_or_overrun(exercise: Exercise) -> None:
    widest_load = exercise.python("widest.py").widest_load
    for address in range(256, 290):
        for row_bytes in range(1, 70):
            starts = [address + r * row_bytes for r in range(20)]
            fits = [s for s in (1, 2, 4, 8, 16) if row_bytes % s == 0 and all(a % s == 0 for a in starts)]
            assert widest_load(address, row_bytes) == max(fits)
