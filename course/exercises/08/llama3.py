"""Exercise 8.2: Llama 3's three ranges.

inv_freq (Dh/2) holds the speed of each pair, in radians a token, as the model was first trained, with
texts of `original` tokens. Return the speeds it uses now:

- a pair that turns more than `high` times within `original` tokens keeps its speed;
- a pair that turns less than `low` times is `factor` times slower;
- between them the two speeds are blended: the weight of the old speed goes from 0 at `low` turns to 1 at
  `high` turns, in a straight line.
"""

from __future__ import annotations

from typing import Any


def scaled(inv_freq: Any, factor: float, low: float, high: float, original: int) -> Any:
    raise NotImplementedError("Your turn")
