"""Exercise 21.2: read a report of benchmarks/kernels.py as a roofline.

A report is what `json.loads` makes of benchmarks/results/cuda_kernels.json:

    report["ceilings"]["read_gb_s"]     how fast this GPU reads, in GB/s (1e9 bytes a second)
    report["ceilings"]["gemm_tflop_s"]  how fast it multiplies, in TFLOP/s (1e12 operations a second)
    report["kernels"]                   dicts with name, us (microseconds), bytes, flops
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    name: str
    at_least_us: float  # the time that the larger of the two limits allows
    share: float  # at_least_us of the time that was measured: 1.0 is the limit
    bound: str  # "memory" or "arithmetic": which of the two it is


def rooflines(report: dict[str, Any]) -> list[Row]:
    """A row for each kernel of the report, in its order."""
    read, peak = report["ceilings"]["read_gb_s"], report["ceilings"]["gemm_tflop_s"]
    rows = []
    for kernel in report["kernels"]:
        memory = kernel["bytes"] / (read * 1e9) * 1e6
        arithmetic = kernel["flops"] / (peak * 1e12) * 1e6
        at_least = max(memory, arithmetic)
        bound = "memory" if memory >= arithmetic else "arithmetic"
        rows.append(Row(kernel["name"], at_least, at_least / kernel["us"], bound))
    return rows


def lost(report: dict[str, Any], step: dict[str, int]) -> list[tuple[str, float]]:
    """Where a step loses its time: (name, microseconds above the limit in all calls), the largest first.

    `step` says how often each kernel runs in a step. KeyError if the report has no such kernel.
    """
    measured = {kernel["name"]: kernel["us"] for kernel in report["kernels"]}
    at_least = {row.name: row.at_least_us for row in rooflines(report)}
    above = [(name, calls * (measured[name] - at_least[name])) for name, calls in step.items()]
    return sorted(above, key=lambda item: -item[1])
