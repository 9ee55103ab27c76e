"""Exercise 8.3: rows of a file that was written for the interleaved rotation.

In that file the two rows that make a pair of a head are neighbours: 2i and 2i + 1 of the head. This engine
wants them half a head apart: i and i + Dh/2. Return `order`, a list of whole numbers, so that weight[order]
is what this engine wants. weight has num_heads · head_dim rows.
"""

from __future__ import annotations


def order(num_heads: int, head_dim: int) -> list[int]:
    raise NotImplementedError("Your turn")
