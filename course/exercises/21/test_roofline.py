"""Exercise 21.2: on numbers that can be worked out by hand, and on the report of a real GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import Exercise
from tiny_vllm.course.lab import REPOSITORY

BY_HAND: dict[str, Any] = {
    "ceilings": {"read_gb_s": 1000.0, "copy_gb_s": 900.0, "gemm_tflop_s": 100.0},
    "kernels": [
        {"name": "reads", "us": 20.0, "bytes": 10_000_000, "flops": 20_000_000},  # 10 µs, 0.2 µs
        {"name": "multiplies", "us": 100.0, "bytes": 1_000_000, "flops": 8_000_000_000},  # 1 µs, 80 µs
        {"name": "tiny", "us": 2.0, "bytes": 1_000, "flops": 0},  # 0.001 µs
    ],
}


def test_by_hand(exercise: Exercise) -> None:
    rows = exercise.python("roofline.py").rooflines(BY_HAND)
    assert [(r.name, r.bound) for r in rows] == [
        ("reads", "memory"),
        ("multiplies", "arithmetic"),
        ("tiny", "memory"),
    ]
    assert [r.at_least_us for r in rows] == pytest.approx([10.0, 80.0, 0.001])
    assert [r.share for r in rows] == pytest.approx([0.5, 0.8, 0.0005])


def test_many_small_losses_are_a_large_one(exercise: Exercise) -> None:
    lost = exercise.python("roofline.py").lost
    found = lost(BY_HAND, {"multiplies": 1, "tiny": 100, "reads": 3})
    assert [name for name, _ in found] == ["tiny", "reads", "multiplies"]
    assert [us for _, us in found] == pytest.approx([199.9, 30.0, 20.0])
    with pytest.raises(KeyError):
        lost(BY_HAND, {"unknown": 1})


def test_a_real_report(exercise: Exercise) -> None:
    report = json.loads((REPOSITORY / "benchmarks/results/cuda_kernels.json").read_text(encoding="utf-8"))
    rows = {row.name: row for row in exercise.python("roofline.py").rooflines(report)}
    assert len(rows) == len(report["kernels"])
    assert rows["norm_gemv lm_head m=1"].bound == "memory"
    assert rows["cublas gate_up m=8192"].bound == "arithmetic"
    assert rows["attention_prefill_hopper 1 x 32768"].bound == "arithmetic"
    # 131,072 rows of 2,048 numbers of 2 bytes would be 0.54 GB; the vocabulary has 128,256 rows.
    head = 128_256 * 2_048 * 2 / (report["ceilings"]["read_gb_s"] * 1e3)
    assert rows["norm_gemv lm_head m=1"].at_least_us == pytest.approx(head, rel=0.01)
