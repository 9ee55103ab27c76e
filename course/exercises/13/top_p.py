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


def top_p(logits: Any, p: float) -> list[int]:
    raise NotImplementedError("Your turn")
