"""Exercise 11.2: tiles that a block visits, against asking each row for each key."""

from __future__ import annotations

import pytest
from conftest import Exercise


@pytest.mark.parametrize("keys", [4, 16])
@pytest.mark.parametrize("window", [1, 5, 24, 10**9])
@pytest.mark.parametrize("group", [1, 3])
def test_tiles(exercise: Exercise, group: int, window: int, keys: int) -> None:
    tiles = exercise.python("tiles.py").tiles
    for first_row, last_row in ((0, 0), (0, 15), (16, 31), (32, 40), (3, 34)):
        for first_position in (0, 1, 15, 16, 37):
            positions = [first_position + row // group for row in range(first_row, last_row + 1)]
            expected = []
            for tile in range(20):
                of_tile = range(tile * keys, (tile + 1) * keys)
                sees = [[p - window < key <= p for key in of_tile] for p in positions]
                if any(map(any, sees)):
                    expected.append((tile, not all(map(all, sees))))
            found = tiles(
                first_row, last_row, group=group, first_position=first_position, window=window, keys=keys
            )
            assert found == expected, (first_row, last_row, first_position)
