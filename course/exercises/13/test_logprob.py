"""Exercise 13.3: log probabilities, near the top and far from it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import Exercise


@pytest.mark.parametrize("shift", [-7000.0, 0.0, 9000.0])
def test_it_is_exact_far_from_the_top(exercise: Exercise, shift: float) -> None:
    logprob = exercise.python("logprob.py").logprob
    logits = np.array([0, -1, -2000, -1, -np.inf], np.float32) + np.float32(shift)
    log_sum = math.log(1 + 2 * math.exp(-1))
    for token, (expected, rank) in enumerate([(0, 1), (-1, 2), (-2000, 4), (-1, 2)]):
        value, place = logprob(logits, token)
        assert value == pytest.approx(expected - log_sum, rel=1e-9)
        assert place == rank
    assert logprob(logits, 4) == (-math.inf, 5)
    assert logits[0] == shift, "the caller's logits have been changed"


def test_a_long_text_has_a_small_probability_and_not_none(exercise: Exercise) -> None:
    rows = np.zeros((3000, 4), np.float32)  # a quarter for each token
    total = exercise.python("logprob.py").total(rows, [1] * 3000)
    assert total == pytest.approx(3000 * math.log(0.25), rel=1e-12)  # the probability itself is 10^-1806
