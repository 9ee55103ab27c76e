"""Exercise 22.3: on a report of round numbers, and on the one in benchmarks/results."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import Exercise
from tiny_vllm.course.lab import REPOSITORY


def row(case: str, median: float) -> dict[str, Any]:
    return {"case": case, "unit": "tok/s", "median": median}


REPORT = {
    "results": [
        {"case": "batch 1, 32-token prompt, 128 new: per decoded token", "unit": "ms", "median": 1.0},
        row("batch 8, 128-token prompts, 256 new: decode alone", 8_000.0),  # 1 ms a step
        row("batch 64, 128-token prompts, 256 new: decode alone", 32_000.0),  # 2 ms
        row("batch 256, 128-token prompts, 256 new: decode alone", 64_000.0),  # 4 ms
        row("batch 512, 128-token prompts, 256 new: decode alone", 60_000.0),  # 8.5 ms, and dearer
        row("batch 256, 128-token prompts, 256 new: whole run", 50_000.0),
        row("batch 16, 1024-token prompts, 256 new: decode alone", 99_000.0),
        row("batch 32, 128-token prompts, 64 new: decode alone", 99_000.0),
        row("batch 128, 128-token prompts, 256 new: decode alone, profiled", 99_000.0),
    ]
}


def test_rates(exercise: Exercise) -> None:
    assert exercise.python("cost.py").decode_rates(REPORT) == {
        8: 8000.0,
        64: 32000.0,
        256: 64000.0,
        512: 60000.0,
    }


def test_a_million(exercise: Exercise) -> None:
    price = exercise.python("cost.py").price_of_a_million
    assert price(1000.0, 3.6) == pytest.approx(1.0)  # a million tokens take 1,000 seconds
    assert price(1000.0, 3.6, busy=0.25) == pytest.approx(4.0)
    for busy in (0.0, 1.5):
        with pytest.raises(ValueError):  # noqa: PT011 - the message is the reader's
            price(1000.0, 3.6, busy=busy)


def test_the_cheapest_that_is_quick_enough(exercise: Exercise) -> None:
    cheapest = exercise.python("cost.py").cheapest
    assert cheapest(REPORT, 3.6, 10.0) == (256, pytest.approx(1 / 64))
    assert cheapest(REPORT, 3.6, 4.0) == (256, pytest.approx(1 / 64))
    assert cheapest(REPORT, 3.6, 3.9) == (64, pytest.approx(1 / 32))
    assert cheapest(REPORT, 3.6, 1.0) == (8, pytest.approx(1 / 8))
    assert cheapest(REPORT, 3.6, 0.5) is None


def test_the_report_of_the_h200(exercise: Exercise) -> None:
    report = json.loads((REPOSITORY / "benchmarks/results/cuda_engine.json").read_text(encoding="utf-8"))
    found = exercise.python("cost.py").cheapest(report, 1.0, 1000.0)
    assert found is not None
    assert found[0] == 256
