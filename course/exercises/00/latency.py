"""Exercise 0.2: what readers wait for, and how fast the engine was for all of them together.

A reader has sent a request at the time `arrival` (in seconds), and `tokens` are the times at which the tokens
of the answer came, in order. Each answer has at least one token.

  first_token(reader)         seconds from the arrival to the first token
  token_to_token(reader)      mean seconds from one token to the next; None for an answer of one token
  tokens_per_second(readers)  all tokens of all answers, divided by the time from the first arrival to the
                              last token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reader:
    arrival: float
    tokens: Sequence[float]


def first_token(reader: Reader) -> float:
    raise NotImplementedError("Your turn")


def token_to_token(reader: Reader) -> float | None:
    raise NotImplementedError("Your turn")


def tokens_per_second(readers: Sequence[Reader]) -> float:
    raise NotImplementedError("Your turn")
