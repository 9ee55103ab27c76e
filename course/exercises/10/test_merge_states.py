"""Exercise 10.2: states of parts, merged in any order, against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Exercise

DIM = 3
State = tuple[Any, Any]  # (2) max and sum; (DIM) sum of weighted values


def state_of(scores: Any, values: Any) -> State:
    largest = scores.max(initial=-np.inf)
    e = np.exp(scores - (0 if np.isneginf(largest) else largest))
    return np.array([largest, e.sum()], np.float32), (e @ values).astype(np.float32)


def merged(exercise: Exercise, a: State, b: State) -> State:
    result = a[0].copy(), a[1].copy()
    exercise.kernels("merge_states.cpp")("merge_states", *result, *b, DIM)
    return result


def assert_like(found: State, expected: State) -> None:
    assert found[0][0] == expected[0][0], "the largest"
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1.0, 40.0, 1e5])
def test_any_cut_and_any_order(exercise: Exercise, size: float) -> None:
    rng = np.random.default_rng(int(size))
    scores = (size * rng.standard_normal(12)).astype(np.float32).astype(np.float64)
    values = rng.standard_normal((12, DIM))
    whole = state_of(scores, values)
    for first, second in ((1, 2), (4, 8), (4, 4), (0, 11)):
        cuts = slice(0, first), slice(first, second), slice(second, 12)
        a, b, c = (state_of(scores[part], values[part]) for part in cuts)
        assert_like(merged(exercise, merged(exercise, a, b), c), whole)
        assert_like(merged(exercise, a, merged(exercise, b, c)), whole)
        assert_like(merged(exercise, merged(exercise, c, b), a), whole)


@pytest.mark.parametrize("size", [1.0, 1e5])
def test_an_empty_part_changes_nothing(exercise: Exercise, size: float) -> None:
    rng = np.random.default_rng(7)
    empty = state_of(np.zeros(0), np.zeros((0, DIM)))
    for sign in (1, -1):
        some = state_of(sign * size * rng.random(5), rng.standard_normal((5, DIM)))
        for a, b, which in ((some, empty, "b is empty"), (empty, some, "a is empty")):
            found = merged(exercise, a, b)
            np.testing.assert_array_equal(found[0], some[0], f"max and sum, when {which}")
            np.testing.assert_array_equal(found[1], some[1], f"the values, when {which}")
    nothing = merged(exercise, empty, empty)
    np.testing.assert_array_equal(nothing[0], [-np.inf, 0], "max and sum of two empty parts")
    np.testing.assert_array_equal(nothing[1], np.zeros(DIM), "the values of two empty parts")
