"""Exercise 3.2: sectors, counted byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise


@pytest.mark.parametrize(
    ("distance", "size", "start", "expected"),
    [
        (4, 4, 0, 4),  # neighbouring float32
        (4, 4, 4, 5),  # one number further: the last one is in a fifth sector
        (2, 2, 0, 2),  # bfloat16
        (16, 16, 0, 16),
        (16, 16, 8, 17),  # each second thread loads from two sectors
        (8, 4, 0, 8),
        (2304, 4, 0, 32),
        (0, 4, 0, 1),
        (0, 4, 30, 2),  # all the same four bytes, across an edge
    ],
)
def test_patterns(exercise: Exercise, distance: int, size: int, start: int, expected: int) -> None:
    found = exercise.python("sectors.py").sectors([start + distance * t for t in range(32)], size)
    assert found == expected


def test_any_addresses(exercise: Exercise) -> None:
    rng = np.random.default_rng(3)
    for size in (1, 2, 4, 8, 16):
        addresses = [int(a) for a in rng.integers(0, 4000, 32)]
        touched = np.zeros(5000, bool)
        for address in addresses:
            touched[address : address + size] = True
        expected = sum(bool(touched[i : i + 32].any()) for i in range(0, 5000 - 31, 32))
        assert exercise.python("sectors.py").sectors(addresses, size) == expected


@pytest.mark.parametrize(
    ("distance", "size", "start", "expected"),
    [(4, 4, 0, 1), (4, 4, 4, 0.8), (8, 4, 0, 0.5), (2304, 4, 0, 0.125), (0, 4, 0, 0.125), (2, 4, 0, 66 / 96)],
)
def test_how_much_is_used(exercise: Exercise, distance: int, size: int, start: int, expected: float) -> None:
    found = exercise.python("sectors.py").share_used([start + distance * t for t in range(32)], size)
    assert found == pytest.approx(expected)
