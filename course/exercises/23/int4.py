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

import numpy.typing as npt

Array = npt.NDArray[Any]


def quantise(weight: Array, group: int) -> tuple[Array, Array]:
    """ValueError if K is no multiple of the group, or the group is odd."""
    raise NotImplementedError("Your turn")


def dequantise(packed: Array, scales: Array) -> Array:
    """The weights (N, K) in float32, as near as they can be."""
    raise NotImplementedError("Your turn")


def bits_a_weight(group: int, scale_bits: int = 16) -> float:
    """What a weight takes in memory, with its part of the scale."""
    raise NotImplementedError("Your turn")
