"""Exercise 12.2: the second half of a layer, in numpy.

mlp_half(residual, norm_weight, gate, up, down, eps) -> residual + down(silu(gate(h)) · up(h))

h is RMSNorm(residual). residual (T, D), norm_weight (D), gate (F, D), up (F, D), down (D, F), all float32.
The result is a new array: the caller still needs what it gave.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any


def mlp_half(residual: Array, norm_weight: Array, gate: Array, up: Array, down: Array, eps: float) -> Array:
    mean = np.mean(residual**2, axis=1, keepdims=True)
    hidden = residual / np.sqrt(mean + eps) * norm_weight  # (T, D)
    opened = hidden @ gate.T  # (T, F)
    opened = opened / (1 + np.exp(-opened))
    return residual + (opened * (hidden @ up.T)) @ down.T  # (T, F) x (F, D) -> (T, D)
