"""Exercise 9.2: does an attention look into the future?

attention(q, k, v) takes three arrays (T, Dh), one row a token, and returns (T, Dh). You cannot see inside.
Find out whether any of its rows depends on a token after it: in its key, its value, or only in how the
weights are divided. Try it with rows of your own; make them with numpy.random.default_rng(0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def looks_ahead(attention: Callable[[Any, Any, Any], Any]) -> bool:
    rng = np.random.default_rng(0)
    rows = 12
    q, k, v = rng.standard_normal((3, rows, 8))
    before = attention(q, k, v)
    for changed in range(1, rows):
        for which in (k, v):  # one at a time: a change of both could hide nothing, but says less
            other = which.copy()
            other[changed] = 3 * rng.standard_normal(8)
            after = attention(q, other, v) if which is k else attention(q, k, other)
            if np.abs(after[:changed] - before[:changed]).max() > 1e-9:
                return True
    return False
