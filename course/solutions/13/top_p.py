"""Exercise 13.1: which tokens top_p keeps.

top_p(logits, p) -> the ids that are kept, the most likely first

logits (V) are float32 and may be -infinity (then the probability is 0), but not all of them are. p is in
(0, 1].
Tokens are taken in order, the most likely first and of equals the lower id, until their probabilities add up
to p or more. The token that reaches p is kept. With p = 1 all tokens with a probability above 0 are kept,
whatever rounding does to the sum. A token with probability 0 never is.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def top_p(logits: Any, p: float) -> list[int]:
    # By logits, not by probabilities: two different logits may have equal probabilities after rounding.
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64) - float(logits.max()))
    order, weights = order[weights > 0], weights[weights > 0]
    if p == 1:
        return [int(i) for i in order]
    sums = np.cumsum(weights)
    reached = int(np.searchsorted(sums, p * sums[-1]))  # the first sum that is not below
    return [int(i) for i in order[: reached + 1]]
