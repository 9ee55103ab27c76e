"""Exercise 23.1: guess tokens by what was there before, and check them all in one step.

`model(tokens, count)` is one step of the engine, greedy: for each of the last `count` prefixes of tokens it
returns the token that comes next. model([5, 6, 7], 2) returns what follows [5, 6], and what follows [5, 6,
7]. A step costs the same for every count up to 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Model = Callable[[Sequence[int], int], list[int]]


def draft(tokens: Sequence[int], n: int, most: int) -> list[int]:
    """The tokens, at most `most`, that followed the last n tokens when these were there before, most
    recently.

    Empty if they were not there before. What followed may overlap with the last n tokens themselves.
    """
    last = list(tokens[-n:])
    for start in range(len(tokens) - n - 1, -1, -1):
        if list(tokens[start : start + n]) == last:
            return list(tokens[start + n : start + n + most])
    return []


def generate(model: Model, prompt: Sequence[int], new_tokens: int, n: int = 2, most: int = 4) -> list[int]:
    """Exactly new_tokens tokens, the same that one greedy step for each token would give, in fewer steps."""
    tokens = list(prompt)
    end = len(prompt) + new_tokens
    while len(tokens) < end:
        guess = draft(tokens, n, most)
        # Row i says what follows tokens + guess[:i]; the last row is the token after all guesses.
        rows = model([*tokens, *guess], len(guess) + 1)
        right = 0
        while right < len(guess) and guess[right] == rows[right]:
            right += 1
        # Those that were guessed rightly, and one that the model gives for nothing.
        tokens += rows[: right + 1]
    return tokens[len(prompt) : end]
