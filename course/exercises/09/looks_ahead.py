"""Exercise 9.2: does an attention look into the future?

attention(q, k, v) takes three arrays (T, Dh), one row a token, and returns (T, Dh). You cannot see inside.
Find out whether any of its rows depends on a token after it: in its key, its value, or only in how the
weights are divided. Try it with rows of your own; make them with numpy.random.default_rng(0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def looks_ahead(attention: Callable[[Any, Any, Any], Any]) -> bool:
    raise NotImplementedError("Your turn")
