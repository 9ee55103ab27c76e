"""Exercise 20.3: what a step ahead is worth.

For each step the host has some work to do before the GPU can begin with it: to schedule, and to launch. The
GPU does the steps in order.
"""

from __future__ import annotations

from collections.abc import Sequence


def gpu_ends(host: Sequence[float], gpu: Sequence[float], ahead: bool) -> list[float]:
    """When the GPU is done with each step. Step i takes host[i] of the host's time, then gpu[i] of the GPU's.

    The host begins at 0. Without `ahead` it begins with a step when the GPU is done with the one before. With
    `ahead` two steps may be on their way: it begins with step i as soon as it is done with its own work on
    step i - 1 and the GPU is done with step i - 2.
    """
    ends: list[float] = []
    host_end = 0.0
    for i, (mine, its) in enumerate(zip(host, gpu, strict=True)):
        waits_for = i - 2 if ahead else i - 1
        begin = max(host_end, ends[waits_for] if waits_for >= 0 else 0.0)
        host_end = begin + mine
        ends.append(max(host_end, ends[-1] if ends else 0.0) + its)
    return ends


def idle(host: Sequence[float], gpu: Sequence[float], ahead: bool) -> float:
    """How long the GPU has nothing to do, from 0 until the end of the last step."""
    ends = gpu_ends(host, gpu, ahead)
    return ends[-1] - sum(gpu) if ends else 0.0
