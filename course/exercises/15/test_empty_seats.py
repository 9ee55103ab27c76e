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
    given = (ctypes.c_int32 * len(lengths))(*lengths)
    found = int(entry(given, len(lengths), seats))
    assert list(given) == lengths, "the caller's lengths have been changed"
    return found


def test_the_chapters_twelve(exercise: Exercise) -> None:
    assert _call(exercise, "steps", list(LENGTHS), 4) == 60
    assert _call(exercise, "empty_seats", list(LENGTHS), 4) == 134
    assert _call(exercise, "sorted_steps", list(LENGTHS), 4) == 39


def test_many_long_answers(exercise: Exercise) -> None:
    lengths = [2**31 - 1, 5, 2**31 - 1]
    assert _call(exercise, "steps", lengths, 2) == 2**32 - 2
    assert _call(exercise, "empty_seats", lengths, 2) == 2**32 - 7
    assert _call(exercise, "sorted_steps", lengths, 2) == 2**32 - 2


@pytest.mark.parametrize(("count", "seats"), [(1, 1), (1, 8), (30, 1), (30, 4), (30, 7), (64, 64)])
def test_it_is_what_the_scheduler_does(exercise: Exercise, count: int, seats: int) -> None:
    lengths = np.random.default_rng(count + seats).integers(1, 50, count).tolist()
    steps, used = simulate("static", lengths, seats)
    assert _call(exercise, "steps", lengths, seats) == steps
    assert _call(exercise, "empty_seats", lengths, seats) == steps * seats - used
    assert _call(exercise, "sorted_steps", lengths, seats) == simulate("static", sorted(lengths), seats)[0]
