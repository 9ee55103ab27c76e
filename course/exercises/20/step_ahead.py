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
    raise NotImplementedError("Your turn")


def idle(host: Sequence[float], gpu: Sequence[float], ahead: bool) -> float:
    """How long the GPU has nothing to do, from 0 until the end of the last step."""
    raise NotImplementedError("Your turn")
