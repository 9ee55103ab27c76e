"""Exercise 20.3: when the GPU is done with each step."""

from __future__ import annotations

import pytest
from conftest import Exercise


@pytest.mark.parametrize(
    ("host", "gpu", "ahead", "expected"),
    [
        ([1, 1, 1], [5, 5, 5], False, [6, 12, 18]),
        ([1, 1, 1], [5, 5, 5], True, [6, 11, 16]),
        ([5, 5, 5], [1, 1, 1], False, [6, 12, 18]),
        ([5, 5, 5], [1, 1, 1], True, [6, 11, 16]),
        ([1, 1, 9, 1], [4, 4, 4, 4], True, [5, 9, 18, 22]),  # two on their way, not three
        ([1, 9, 1, 1], [4, 4, 4, 4], True, [5, 14, 18, 22]),
        ([2], [3], True, [5]),
        ([], [], True, []),
    ],
)
def test_ends(
    exercise: Exercise, host: list[float], gpu: list[float], ahead: bool, expected: list[float]
) -> None:
    assert exercise.python("step_ahead.py").gpu_ends(host, gpu, ahead) == pytest.approx(expected)


def test_idle(exercise: Exercise) -> None:
    idle = exercise.python("step_ahead.py").idle
    assert idle([], [], True) == 0
    assert idle([1, 1, 1], [5, 5, 5], False) == pytest.approx(3)
    assert idle([1, 1, 1], [5, 5, 5], True) == pytest.approx(1)  # before the first step
    assert idle([1, 1, 9, 1], [4, 4, 4, 4], True) == pytest.approx(6)
