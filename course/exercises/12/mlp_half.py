"""Exercise 12.2: the second half of a layer, in numpy.

mlp_half(residual, norm_weight, gate, up, down, eps) -> residual + down(silu(gate(h)) · up(h))

h is RMSNorm(residual). residual (T, D), norm_weight (D), gate (F, D), up (F, D), down (D, F), all float32.
The result is a new array: the caller still needs what it gave.
"""

from __future__ import annotations

from typing import Any

import numpy as np  # noqa: F401

Array = Any


def mlp_half(residual: Array, norm_weight: Array, gate: Array, up: Array, down: Array, eps: float) -> Array:
    raise NotImplementedError("Your turn")
