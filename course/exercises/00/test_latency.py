"""Exercise 0.2: latency of one reader, throughput of all."""

from __future__ import annotations

import pytest
from conftest import Exercise


def test_the_first_token_is_counted_from_the_arrival(exercise: Exercise) -> None:
    latency = exercise.python("latency.py")
    assert latency.first_token(latency.Reader(10.0, [10.5, 10.6])) == pytest.approx(0.5)


def test_the_wait_for_the_first_token_is_not_in_the_mean(exercise: Exercise) -> None:
    latency = exercise.python("latency.py")
    assert latency.token_to_token(latency.Reader(0.0, [8.0, 8.1, 8.2, 8.4])) == pytest.approx(0.4 / 3)
    assert latency.token_to_token(latency.Reader(0.0, [1.0, 3.0])) == pytest.approx(2.0)


def test_one_token_has_no_gap(exercise: Exercise) -> None:
    latency = exercise.python("latency.py")
    assert latency.token_to_token(latency.Reader(0.0, [8.0])) is None


def test_throughput_is_not_a_mean_of_rates(exercise: Exercise) -> None:
    latency = exercise.python("latency.py")
    fast = latency.Reader(100.0, [100.1, 100.2, 100.3, 100.4])  # 10 tokens a second
    slow = latency.Reader(100.0, [101.0, 102.0])  # 1 token a second, and the engine was on all the time
    assert latency.tokens_per_second([slow, fast]) == pytest.approx(6 / 2)
    late = latency.Reader(103.0, [104.0])
    assert latency.tokens_per_second([late, fast, slow]) == pytest.approx(7 / 4)
    assert latency.tokens_per_second([fast]) == pytest.approx(4 / 0.4)
