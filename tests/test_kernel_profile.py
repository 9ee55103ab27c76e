"""The timeline and the table of a profile, from records that nobody measured."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

from tiny_vllm.kernel_profile import chrome_trace, summary, table


def record(
    name: str, step: int, start: float, duration: float, moved: int = 0, flops: int = 0
) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, step=step, tokens=10 * step, start_us=start, duration_us=duration, bytes=moved, flops=flops
    )


# Two steps; the profile began when the engine was already running.
RECORDS: list[Any] = [
    record("gemv", 5, 1000.0, 10.0, moved=30_000_000, flops=60_000_000),
    record("race", 5, 1011.0, 4.0),
    record("gemv", 6, 1100.0, 20.0, moved=30_000_000, flops=60_000_000),
    record("gather_rows", 6, 1125.5, 2.0, moved=4096),
]


def test_the_timeline() -> None:
    trace = json.loads(json.dumps(chrome_trace(RECORDS, "cuda, Some GPU")))
    named = {(e["name"], e["args"]["name"]) for e in trace["traceEvents"] if e["ph"] == "M"}
    assert named == {
        ("process_name", "cuda, Some GPU"),
        ("thread_name", "steps"),
        ("thread_name", "kernels"),
    }
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len({e["pid"] for e in slices}) == 1
    rows = {cat: [e for e in slices if e["cat"] == cat] for cat in ("step", "kernel")}
    assert [len({e["tid"] for e in row}) for row in rows.values()] == [1, 1]
    assert rows["step"][0]["tid"] != rows["kernel"][0]["tid"]
    assert [(e["name"], e["ts"], e["dur"], e["args"]) for e in rows["step"]] == [
        ("step 5", 0, 15, {"tokens": 50, "kernels": 2, "busy_us": 14}),
        ("step 6", 100, 27.5, {"tokens": 60, "kernels": 2, "busy_us": 22}),
    ]
    assert [(e["name"], e["ts"], e["dur"], e["args"]) for e in rows["kernel"]] == [
        ("gemv", 0, 10, {"tokens": 50, "bytes": 30_000_000, "GB/s": 3000, "TFLOP/s": 6}),
        ("race", 11, 4, {"tokens": 50}),
        ("gemv", 100, 20, {"tokens": 60, "bytes": 30_000_000, "GB/s": 1500, "TFLOP/s": 3}),
        ("gather_rows", 125.5, 2, {"tokens": 60, "bytes": 4096, "GB/s": 2}),
    ]


def test_the_table() -> None:
    lines = table(RECORDS).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [re.split("  +", line) for line in lines] == [
        ["kernel", "calls", "total ms", "mean us", "MB", "GB/s", "TFLOP/s", "share"],
        ["gemv", "2", "0.030", "15.00", "60.0", "2,000.0", "4.0", "83.3%"],
        ["race", "1", "0.004", "4.00", "–", "–", "–", "11.1%"],
        ["gather_rows", "1", "0.002", "2.00", "0.0", "2.0", "–", "5.6%"],
    ]


def test_the_summary() -> None:
    """The time between two steps belongs to neither."""
    assert summary(RECORDS) == (
        "2 steps, 4 kernels: 0.036 ms in kernels, 0.043 ms from the first to the last of each step"
    )


def test_a_profile_of_nothing() -> None:
    assert [e["ph"] for e in chrome_trace([], "cuda")["traceEvents"]] == ["M"] * 3
    assert len(table([]).splitlines()) == 1
    assert summary([]).startswith("0 steps, 0 kernels: 0.000 ms")


def test_one_is_not_a_plural() -> None:
    assert summary(RECORDS[:1]).startswith("1 step, 1 kernel: 0.010 ms")
