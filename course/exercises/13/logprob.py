"""Exercise 13.3: log probabilities.

logprob(logits, token) -> (log probability of the token, its rank)
total(rows, tokens) -> log probability of all the tokens together: that of token i under row i, added up

logits (V) and rows (n, V) are float32, anywhere between -10,000 and 10,000, or -infinity: a token that is not
allowed. Its log probability is -infinity. The rank is 1 for the most likely token; equal ones share a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def logprob(logits: Any, token: int) -> tuple[float, int]:
    raise NotImplementedError("Your turn")


def total(rows: Any, tokens: Sequence[int]) -> float:
    raise NotImplementedError("Your turn")
