"""Exercise 22.2: on requests whose times are known."""

from __future__ import annotations

import pytest
from conftest import Exercise


def test_percentiles_are_values_that_were_seen(exercise: Exercise) -> None:
    percentile = exercise.python("slo.py").percentile
    values = [float(v) for v in range(100, 0, -1)]  # 1 to 100, not sorted
    assert percentile(values, 50) == 50.0
    assert percentile(values, 99) == 99.0
    assert percentile(values, 100) == 100.0
    three = [3.0, 1.0, 2.0]
    assert percentile(three, 50) == 2.0
    assert three == [3.0, 1.0, 2.0], "the caller's list has been changed"
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0], 0) == 1.0
    with pytest.raises(ValueError):  # noqa: PT011 - the message is the reader's
        percentile([], 50)


def test_a_load(exercise: Exercise) -> None:
    slo = exercise.python("slo.py")
    records = [
        slo.Record(10.0, [10.1, 10.2, 10.3]),  # good
        slo.Record(10.0, [10.9, 11.0]),  # its first token came late
        slo.Record(11.0, [11.2]),  # good: one token, no gap
        slo.Record(12.0, [12.1, 12.2, 13.9]),  # a mean gap of 0.9
        slo.Record(12.0, [], finished=False),  # refused
        slo.Record(12.5, [12.6, 12.7], finished=False),  # broken off
    ]
    summary = slo.summary(records, most_ttft=0.5, most_gap=0.25)
    assert summary.ttft_50 == pytest.approx(0.1)
    assert summary.ttft_99 == pytest.approx(0.9)
    assert summary.gap_50 == pytest.approx(0.1)
    assert summary.gap_99 == pytest.approx(1.7)
    assert summary.goodput == pytest.approx(2 / 3.9)


def test_a_gap_in_the_middle_is_in_the_percentile_and_not_in_the_mean(exercise: Exercise) -> None:
    slo = exercise.python("slo.py")
    tokens = [1.0 + 0.01 * i + (0.5 if i >= 50 else 0.0) for i in range(100)]
    summary = slo.summary([slo.Record(0.9, tokens)], most_ttft=0.2, most_gap=0.02)
    assert summary.goodput == pytest.approx(1 / (tokens[-1] - 0.9))
    assert summary.gap_99 == pytest.approx(0.51)
    assert summary.gap_50 == pytest.approx(0.01)


def test_many_quick_gaps_do_not_hide_a_slow_one(exercise: Exercise) -> None:
    slo = exercise.python("slo.py")
    summary = slo.summary([slo.Record(0.0, [0.1, 0.2, 0.3, 1.8])], most_ttft=0.5, most_gap=0.2)
    assert summary.goodput == 0  # the mean is 0.57; the median would be 0.1


def test_refused_requests_make_the_time_no_shorter(exercise: Exercise) -> None:
    slo = exercise.python("slo.py")
    records = [slo.Record(0.0, [], finished=False), slo.Record(9.0, [9.5, 10.0])]
    assert slo.summary(records, 1.0, 1.0).goodput == pytest.approx(0.1)
