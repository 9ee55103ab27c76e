"""Exercise 21.3: claims with one fault, with several, and an honest one."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from conftest import Exercise

WARM = [10.0, 10.2, 9.9, 10.1, 10.0]
COLD = [80.0, 10.2, 9.9, 10.1, 10.0]
COOL = [21.0, 10.2, 9.9, 10.1, 10.0]
UNEVEN = [10.0, 10.2, 7.0, 10.1, 10.0]


def claim(seconds: list[float], by: Any, **other: Any) -> dict[str, Any]:
    return {"seconds": seconds, "work": 300.0, "claimed": 300.0 / by(seconds), **other}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (claim(WARM, statistics.median, ceiling=40.0), set()),
        (claim(WARM, statistics.mean), set()),  # a mean of even times is no lie
        (claim(WARM, min), set()),  # nor the smallest of them
        (claim(COLD, statistics.mean), {"cold"}),
        (claim(COOL, statistics.mean), {"cold"}),
        (claim([20.0, 10.2, 9.9, 10.1, 10.0], statistics.mean), set()),  # not more than twice the median
        (claim(COLD, statistics.median), set()),  # the cold call is there, and does not count
        (claim([10.0, 80.0, 10.1, 9.9, 10.0], statistics.mean), set()),  # an outlier, but not the first call
        (claim(UNEVEN, min), {"best"}),
        (claim([10.0, 10.2, 9.4, 10.1, 10.0], min), {"best"}),  # 6 % above the median
        (claim([10.0, 10.2, 9.6, 10.1, 10.0], min), set()),  # 4 %
        (claim(UNEVEN, lambda s: 0.98 * min(s)), set()),  # 2 % from the best is another rate
        (claim(UNEVEN, statistics.median), set()),
        (claim(WARM, statistics.median, ceiling=25.0), {"cache"}),
        (claim(WARM, statistics.median, cached_tokens=384), {"not computed"}),
        (claim(WARM, statistics.median, asked_tokens=[128, 128], made_tokens=[128, 31]), {"stopped early"}),
        (claim(WARM, statistics.median, asked_tokens=[99, 99], made_tokens=[150, 98]), {"stopped early"}),
        (claim(WARM, statistics.median, asked_tokens=[128, 64], made_tokens=[128, 64]), set()),
        (claim(UNEVEN, min, ceiling=40.0, cached_tokens=16), {"best", "cache", "not computed"}),
    ],
)
def test_what_is_wrong_with_it(exercise: Exercise, record: dict[str, Any], expected: set[str]) -> None:
    lies = exercise.python("lies.py")
    assert lies.faults(lies.Record(**record)) == expected
