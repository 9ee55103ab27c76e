"""Exercise 0.1: the loop that makes a text out of a model.

`scores_of(ids)` is the model: it takes a list of token ids and returns a list with one score for each token
of the vocabulary. The highest score belongs to the token that fits best as the next one. It remembers nothing
between two calls.

Write the loop. Each round
  - calls scores_of once, with all ids there are so far,
  - chooses the id of the highest score (of equal scores, the smallest id),
  - appends it.
It ends after `max_tokens` rounds, or earlier, when the chosen id is one of `end_ids`. Do not call scores_of
when no further token is wanted: a call is what costs time.

Returns the new ids only, without the prompt, and with the end id if one was chosen. The caller's list
`prompt` must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Model = Callable[[list[int]], Sequence[float]]


def generate(scores_of: Model, prompt: list[int], max_tokens: int, end_ids: Collection[int]) -> list[int]:
    raise NotImplementedError("Your turn")
