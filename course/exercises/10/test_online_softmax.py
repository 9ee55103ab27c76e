"""Exercise 10.1: the online softmax, one key at a time, against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Exercise


def weighted_mean(exercise: Exercise, scores: Any, values: Any) -> Any:
    library = exercise.kernels("online_softmax.cpp")
    dim = values.shape[1]
    state = np.full(2, 123, np.float32)  # what was in memory before
    out = np.full(dim, 456, np.float32)
    library("begin_row", state, out, dim)
    for score, value in zip(scores.tolist(), values, strict=True):
        library("add_key", state, out, score, np.ascontiguousarray(value), dim)
    library("end_row", state, out, dim)
    return out


def expected(scores: Any, values: Any) -> Any:
    seen = ~np.isneginf(scores)
    wide = scores[seen].astype(np.float64)
    e = np.exp(wide - wide.max())
    return e / e.sum() @ values[seen].astype(np.float64)


def case(keys: int, size: float) -> tuple[Any, Any]:
    rng = np.random.default_rng(keys)
    return (size * rng.standard_normal(keys)).astype(np.float32), rng.standard_normal((keys, 5)).astype(
        np.float32
    )


@pytest.mark.parametrize("size", [1, 50, 1e5])
@pytest.mark.parametrize("keys", [2, 33, 300])
def test_any_scores(exercise: Exercise, keys: int, size: float) -> None:
    scores, values = case(keys, size)
    for order in (np.arange(keys), np.argsort(scores), np.argsort(-scores)):
        found = weighted_mean(exercise, scores[order], values[order])
        np.testing.assert_allclose(found, expected(scores, values), rtol=1e-4, atol=1e-5)


def test_one_key_gives_its_value_exactly(exercise: Exercise) -> None:
    _, values = case(1, 1)
    for score in (-1e5, 0.0, 88.9, 1e5):
        np.testing.assert_array_equal(weighted_mean(exercise, np.float32([score]), values), values[0])


@pytest.mark.parametrize("hidden", [[0, 1], [5], [9], [0, 3, 4, 9]], ids=str)
def test_hidden_keys_leave_no_trace(exercise: Exercise, hidden: list[int]) -> None:
    scores, values = case(10, 30)
    scores[hidden] = -np.inf
    values[hidden] = np.nan
    np.testing.assert_allclose(
        weighted_mean(exercise, scores, values), expected(scores, values), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("keys", [0, 1, 4])
def test_nothing_seen_gives_zeros(exercise: Exercise, keys: int) -> None:
    found = weighted_mean(exercise, np.full(keys, -np.inf, np.float32), np.ones((keys, 3), np.float32))
    np.testing.assert_array_equal(found, np.zeros(3))


@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_broken_score_is_seen(exercise: Exercise, place: int) -> None:
    scores, values = case(4, 1)
    scores[place] = np.nan
    found = weighted_mean(exercise, scores, values)
    assert np.isnan(found).all(), f"score {place} of 4 is NaN, and the result is {found}"


def test_two_rows_in_turns(exercise: Exercise) -> None:
    library = exercise.kernels("online_softmax.cpp")
    (scores, values), (others, other_values) = case(6, 2), case(7, 3)
    states, outs = np.empty((2, 2), np.float32), np.empty((2, 5), np.float32)
    for row in (0, 1):
        library("begin_row", states[row], outs[row], 5)
    for i in range(6):
        library("add_key", states[0], outs[0], float(scores[i]), values[i], 5)
        library("add_key", states[1], outs[1], float(others[i]), other_values[i], 5)
    for row in (0, 1):
        library("end_row", states[row], outs[row], 5)
    np.testing.assert_allclose(outs[0], expected(scores, values), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outs[1], expected(others[:6], other_values[:6]), rtol=1e-4, atol=1e-5)
