"""Exercise 13.1: what top_p keeps, by hand and against the engine."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm import ops

HALVES = np.log(np.array([0.25, 0.125, 0.5, 0.125], np.float32))


@pytest.mark.parametrize(
    ("p", "kept"),
    [(0.01, [2]), (0.49, [2]), (0.51, [2, 0]), (0.8, [2, 0, 1]), (0.9, [2, 0, 1, 3]), (1.0, [2, 0, 1, 3])],
)
def test_the_token_that_reaches_p_is_kept(exercise: Exercise, p: float, kept: list[int]) -> None:
    top_p = exercise.python("top_p.py").top_p
    assert top_p(HALVES, p) == kept
    assert top_p(HALVES + np.float32(1000), p) == kept  # e^1000 is infinite
    assert top_p(HALVES - np.float32(1000), p) == kept  # e^-1000 is 0


def test_exactly_p_is_enough(exercise: Exercise) -> None:
    quarters = np.zeros(4, np.float32)
    top_p = exercise.python("top_p.py").top_p
    assert [len(top_p(quarters, p)) for p in (0.25, 0.5, 0.75)] == [1, 2, 3]


def test_the_logits_stay_as_they_were(exercise: Exercise) -> None:
    logits = np.array([1, 3, 2], np.float32)
    exercise.python("top_p.py").top_p(logits, 0.5)
    assert logits.tolist() == [1, 3, 2]


def test_what_has_no_probability_is_never_kept(exercise: Exercise) -> None:
    logits = np.array([-np.inf, 2, -np.inf, 1, -np.inf], np.float32)
    assert exercise.python("top_p.py").top_p(logits, 1.0) == [1, 3]
    assert exercise.python("top_p.py").top_p(logits, 1 - 1e-12) == [1, 3]
    logits[4] = -40  # 1 + e^-42 is 1, but the token has a probability
    assert exercise.python("top_p.py").top_p(logits, 1.0) == [1, 3, 4]


def test_of_equal_tokens_the_lower_id_is_first(exercise: Exercise) -> None:
    logits = np.zeros(1000, np.float32)
    assert exercise.python("top_p.py").top_p(logits, 0.2495) == list(range(250))
    assert exercise.python("top_p.py").top_p(logits, 1.0) == list(range(1000))
    logits[1::2] = 1
    assert exercise.python("top_p.py").top_p(logits, 1.0) == [*range(1, 1000, 2), *range(0, 1000, 2)]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_engine_draws_all_of_these_and_no_other(exercise: Exercise, p: float) -> None:
    logits = np.random.default_rng(13).standard_normal(30).astype(np.float32)
    drawn = ops.sample(np.tile(logits, (5000, 1)), top_p=p, positions=np.arange(5000))
    assert set(exercise.python("top_p.py").top_p(logits, p)) == {int(token) for token in drawn}
