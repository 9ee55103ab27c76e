"""Exercise 13.3: log probabilities.

logprob(logits, token) -> (log probability of the token, its rank)
total(rows, tokens) -> log probability of all the tokens together: that of token i under row i, added up

logits (V) and rows (n, V) are float32, anywhere between -10,000 and 10,000, or -infinity: a token that is not
allowed. Its log probability is -infinity. The rank is 1 for the most likely token; equal ones share a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def logprob(logits: Any, token: int) -> tuple[float, int]:
    wide = logits.astype(np.float64)
    top = wide.max()
    log_sum = top + np.log(np.exp(wide - top).sum())
    # Not log(exp(...) / sum): far from the top, exp is 0, and its logarithm says nothing.
    return float(wide[token] - log_sum), 1 + int((logits > logits[token]).sum())


def total(rows: Any, tokens: Sequence[int]) -> float:
    return sum(logprob(row, token)[0] for row, token in zip(rows, tokens, strict=True))
