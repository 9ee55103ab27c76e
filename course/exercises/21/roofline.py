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
    raise NotImplementedError("Your turn")


def lost(report: dict[str, Any], step: dict[str, int]) -> list[tuple[str, float]]:
    """Where a step loses its time: (name, microseconds above the limit in all calls), the largest first.

    `step` says how often each kernel runs in a step. KeyError if the report has no such kernel.
    """
    raise NotImplementedError("Your turn")
