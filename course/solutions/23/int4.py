"""Exercise 23.2: weights in 4 bits, with a scale for each group of neighbours in a row.

    quantise(weight (N, K) float32, group) -> packed (N, K/2) uint8, scales (N, K/group) float32

A weight becomes a whole number from -7 to 7 times the scale of its group, rounded to the nearest. The scale
of a group is its largest absolute value / 7; of a group of zeros it is 0. So the error of a weight is at
most half of its group's scale.

Two numbers share a byte: number 2j of a row is in the low 4 bits of byte j, number 2j + 1 in the high 4 bits,
each as number + 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def quantise(weight: Array, group: int) -> tuple[Array, Array]:
    """ValueError if K is no multiple of the group, or the group is odd."""
    rows, columns = weight.shape
    if group % 2 or columns % group:
        raise ValueError(f"rows of {columns} cannot be cut into groups of {group}")
    groups = weight.reshape(rows, -1, group)
    scales = np.abs(groups).max(axis=2) / np.float32(7)
    divisors = np.where(scales == 0, np.float32(1), scales)[..., None]  # zeros stay zeros
    numbers = np.rint(groups / divisors).astype(np.int8).reshape(rows, columns)
    stored = (numbers + 8).astype(np.uint8)
    packed = stored[:, 0::2] | (stored[:, 1::2] << 4)
    return packed, scales.astype(np.float32)


def dequantise(packed: Array, scales: Array) -> Array:
    """The weights (N, K) in float32, as near as they can be."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    numbers = np.empty((rows, columns), np.float32)
    numbers[:, 0::2] = packed & 15
    numbers[:, 1::2] = packed >> 4
    groups = (numbers - 8).reshape(rows, scales.shape[1], -1)
    return (groups * scales[..., None]).reshape(rows, columns).astype(np.float32)


def bits_a_weight(group: int, scale_bits: int = 16) -> float:
    """What a weight takes in memory, with its part of the scale."""
    return 4 + scale_bits / group
