"""Exercise 23.1: the same tokens as without guessing, in fewer steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from conftest import Exercise


class Model:
    """Its next token is a fixed function of the last three, so its text repeats itself, but not always."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.steps = 0

    def next(self, tokens: Sequence[int]) -> int:
        mixed = sum((i + 1) * (t + 7) ** 2 for i, t in enumerate(tokens[-3:])) + len(tokens) // 40
        return mixed % self.vocabulary

    def __call__(self, tokens: Sequence[int], count: int) -> list[int]:
        assert 1 <= count <= 8
        self.steps += 1
        return [self.next(tokens[: len(tokens) - count + 1 + i]) for i in range(count)]

    def one_by_one(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(new_tokens):
            tokens.append(self.next(tokens))
        return tokens[len(prompt) :]


def test_the_draft_is_what_followed_most_recently(exercise: Exercise) -> None:
    draft = exercise.python("ngram.py").draft
    assert draft([1, 2, 3, 4, 1, 2], 2, 4) == [3, 4, 1, 2]
    assert draft([1, 2, 3, 4, 1, 2], 2, 1) == [3]
    assert draft([1, 2, 8, 1, 2, 9, 1, 2], 2, 2) == [9, 1]
    assert draft([1, 2, 3, 4], 2, 4) == []
    assert draft([5, 5, 5], 2, 4) == [5]  # the end of what is known is the end of the draft
    assert draft([1], 2, 4) == []
    assert draft([7, 3, 7], 1, 4) == [3, 7]


@pytest.mark.parametrize("most", [1, 4, 7])
@pytest.mark.parametrize("vocabulary", [3, 5, 11, 50])
@pytest.mark.parametrize("new_tokens", [1, 2, 100])
def test_the_output_does_not_change(exercise: Exercise, vocabulary: int, most: int, new_tokens: int) -> None:
    model = Model(vocabulary)
    prompt = [1, 2, 3, 1, 2]
    found = exercise.python("ngram.py").generate(model, prompt, new_tokens, most=most)
    assert found == model.one_by_one(prompt, new_tokens)
    assert model.steps <= new_tokens


def test_it_takes_fewer_steps(exercise: Exercise) -> None:
    class Always(Model):
        def next(self, tokens: Sequence[int]) -> int:
            return (tokens[-1] + 1) % 6

    model = Always(6)
    found = exercise.python("ngram.py").generate(model, [0, 1, 2, 3, 4, 5, 0, 1], 100, most=4)
    assert found == model.one_by_one([0, 1, 2, 3, 4, 5, 0, 1], 100)
    assert model.steps == 20  # four guesses that are right, and the token after them
