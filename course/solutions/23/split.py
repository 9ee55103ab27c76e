"""Exercise 23.3: an MLP on several GPUs, with one sum at the end.

    mlp(x) = (silu(g) * u) @ down.T    with  g, u = the first and the second half of  x @ gate_up.T

    x (T, D), gate_up (2F, D): gate rows, then up rows; down (D, F)

Each GPU gets a part of gate_up and a part of down, once, when the model is loaded. In a step each computes
`part` of the same x from its own two weights, and what the parts return is added up over all GPUs. Nothing
else is exchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def split(gate_up: Array, down: Array, gpus: int) -> list[tuple[Array, Array]]:
    """(gate_up, down) for each GPU, of equal sizes. ValueError if F is no multiple of the GPUs."""
    width = down.shape[1]
    if width % gpus:
        raise ValueError(f"{width} columns cannot be shared by {gpus} GPUs")
    gate, up = gate_up[:width], gate_up[width:]
    parts = []
    for i in range(gpus):
        mine = slice(i * width // gpus, (i + 1) * width // gpus)
        # Rows of the gate and the same rows of up: each GPU must be able to multiply them with each other.
        parts.append((np.concatenate([gate[mine], up[mine]]), down[:, mine]))
    return parts


def part(x: Array, gate_up: Array, down: Array) -> Array:
    """What one GPU computes of its weights: (T, D), to be added to what the others compute."""
    gate, up = np.split(x @ gate_up.T, 2, axis=1)
    result: Array = (gate / (1 + np.exp(-gate)) * up) @ down.T
    return result


def bytes_sent(rows: int, dim: int, layers: int, gpus: int) -> int:
    """Bytes that each GPU sends in a step, in bfloat16.

    There are two sums a layer, after attention and after the MLP, of (rows, dim) numbers. In a ring of n
    GPUs each of them sends 2 (n - 1) parts of the array for a sum, a part being 1/n of it. dim is a
    multiple of gpus.
    """
    a_part = rows * dim * 2 // gpus
    return 2 * layers * 2 * (gpus - 1) * a_part
