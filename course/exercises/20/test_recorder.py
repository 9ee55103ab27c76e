"""Exercise 20.2: shapes, and what happens to a recording when memory moves."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Exercise

SIZES = (1, 2, 4, 8)


def new_recorder(exercise: Exercise) -> Any:
    return exercise.python("recorder.py").Recorder(SIZES)


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [(1, 1, (1, 8)), (3, 8, (4, 8)), (5, 9, (8, 16)), (8, 100, (8, 128)), (8, 128, (8, 128)), (9, 1, None)],
)
def test_shapes(exercise: Exercise, rows: int, width: int, expected: tuple[int, int] | None) -> None:
    assert new_recorder(exercise).shape(rows, width) == expected


def test_first_second_and_later_steps(exercise: Exercise) -> None:
    recorder = new_recorder(exercise)
    assert [recorder.step(rows, 3, 0) for rows in (5, 6, 7, 8)] == [
        "as it is",
        "recorded",
        "replayed",
        "replayed",
    ]
    assert recorder.step(4, 3, 0) == "as it is"  # another shape
    assert recorder.step(8, 9, 0) == "as it is"
    assert recorder.step(8, 8, 0) == "replayed"
    assert recorder.step(9, 3, 0) == "as it is"
    assert recorder.step(9, 3, 0) == "as it is"  # too many rows to be recorded, ever


def test_two_recorders_are_two(exercise: Exercise) -> None:
    module = exercise.python("recorder.py")
    first, second = module.Recorder(SIZES), module.Recorder((4,))
    for expected in ("as it is", "recorded", "replayed"):
        assert first.step(3, 1, 0) == expected
        assert second.step(3, 1, 0) == expected


def test_a_move_ends_all_recordings(exercise: Exercise) -> None:
    recorder = new_recorder(exercise)
    for rows in (1, 1, 1, 4, 4):
        recorder.step(rows, 1, 0)
    assert recorder.step(4, 1, 1) == "recorded"
    assert recorder.step(1, 1, 1) == "recorded"  # its addresses were the old ones too
    assert recorder.step(1, 1, 1) == "replayed"
    assert recorder.step(8, 1, 2) == "as it is"
    assert recorder.step(4, 1, 2) == "recorded"
    assert recorder.step(4, 1, 5) == "recorded"  # several moves at once


def test_a_step_that_is_not_recorded_may_move_memory(exercise: Exercise) -> None:
    recorder = new_recorder(exercise)
    recorder.step(2, 1, 0)
    recorder.step(2, 1, 0)
    recorder.step(9, 1, 1)  # grew something
    assert recorder.step(2, 1, 1) == "recorded"
