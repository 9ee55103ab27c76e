"""Exercise 0.1: the loop, on a model that is a rule, and on the small model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from conftest import Exercise

VOCABULARY = 10


class Rule:
    """A "model" whose next token is the sum of all ids so far, in one digit: each id matters."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: list[int]) -> Sequence[float]:
        self.calls += 1
        scores = [-5.0] * VOCABULARY  # scores may be negative
        scores[sum(ids) % VOCABULARY] = -1.0
        return scores


@pytest.mark.parametrize(("max_tokens", "expected"), [(0, []), (1, [7]), (5, [7, 4, 8, 6, 2])])
def test_all_ids_are_given_back_to_the_model(
    exercise: Exercise, max_tokens: int, expected: list[int]
) -> None:
    model = Rule()
    assert exercise.python("generate.py").generate(model, [3, 4], max_tokens, ()) == expected
    assert model.calls == max_tokens


def test_an_end_id_ends_it_and_is_returned(exercise: Exercise) -> None:
    model = Rule()
    assert exercise.python("generate.py").generate(model, [3, 4], 100, {8, 9}) == [7, 4, 8]
    assert model.calls == 3


def test_an_end_id_in_the_prompt_ends_nothing(exercise: Exercise) -> None:
    generate = exercise.python("generate.py").generate
    assert generate(Rule(), [4, 3], 2, {4}) == [7, 4]
    assert generate(Rule(), [1, 1], 3, {1}) == [2, 4, 8], "something is left of the call before"


def test_of_equal_scores_the_smallest_id_is_chosen(exercise: Exercise) -> None:
    assert exercise.python("generate.py").generate(lambda ids: [0, 2, 1, 2], [0], 2, ()) == [1, 1]


def test_the_prompt_stays_as_it_was(exercise: Exercise) -> None:
    prompt = [3, 4]
    exercise.python("generate.py").generate(Rule(), prompt, 4, ())
    assert prompt == [3, 4]


def test_it_says_what_the_engine_says(exercise: Exercise) -> None:
    from tiny_vllm import Engine, SamplingParams

    engine = Engine(device="cpu", kv_cache_memory_bytes=32_000_000, num_threads=2)
    tokenizer = engine.tokenizer
    assert tokenizer is not None

    def scores_of(ids: list[int]) -> Sequence[float]:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
        output = engine.generate({"prompt_token_ids": ids}, params)[0].outputs[0]
        scores = [-1000.0] * tokenizer.vocab_size
        for token, found in (output.logprobs or [{}])[0].items():
            scores[token] = found.logprob
        return scores

    prompt = tokenizer.encode("The capital of France is")
    ids = exercise.python("generate.py").generate(scores_of, prompt, 7, (tokenizer.eos_token_id,))
    assert tokenizer.decode(ids) == " Paris.\n\nThe answer is"
