"""Exercise 15.3: seats that nobody uses, against the engine's scheduler."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm.course.chapter_15 import LENGTHS, simulate


def _call(exercise: Exercise, function: str, lengths: list[int], seats: int) -> int:
    entry = exercise.library("empty_seats.cpp")[function]
    entry.restype = ctypes.c_int64
    array = (ctypes.c_int32 * len(lengths))(*lengths)
    result = int(entry(array, len(lengths), seats))
    assert list(array) == lengths, f"{function} has changed `lengths`"
    return result


def test_the_chapters_twelve(exercise: Exercise) -> None:
    assert _call(exercise, "steps", list(LENGTHS), 4) == 60
    assert _call(exercise, "empty_seats", list(LENGTHS), 4) == 134
    assert _call(exercise, "sorted_steps", list(LENGTHS), 4) == 39


@pytest.mark.parametrize(("count", "seats"), [(1, 1), (1, 8), (30, 1), (30, 4), (30, 7), (64, 64)])
def test_it_is_what_the_scheduler_does(exercise: Exercise, count: int, seats: int) -> None:
    lengths = np.random.default_rng(count + seats).integers(1, 50, count).tolist()
    steps, used = simulate("static", lengths, seats)
    assert _call(exercise, "steps", lengths, seats) == steps
    assert _call(exercise, "empty_seats", lengths, seats) == steps * seats - used
    assert _call(exercise, "sorted_steps", lengths, seats) == simulate("static", sorted(lengths), seats)[0]
