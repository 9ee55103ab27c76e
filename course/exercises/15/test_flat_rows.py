"""Exercise 15.1: rows of several requests end to end."""

from __future__ import annotations

import numpy as np
from conftest import Exercise


def test_three_prompts(exercise: Exercise) -> None:
    step = exercise.python("flat_rows.py").flatten([([7, 8, 9], 0, 3), ([5], 0, 1), ([1, 2], 0, 2)])
    assert step.token_ids == [7, 8, 9, 5, 1, 2]
    assert step.positions == [0, 1, 2, 0, 0, 1]
    assert step.query_start == [0, 3, 4, 6]
    assert step.context_len == [3, 1, 2]
    assert step.logits_rows == [2, 3, 5]


def test_a_decode_a_part_of_a_prompt_and_its_end(exercise: Exercise) -> None:
    chunks = [(list(range(10, 20)), 9, 1), (list(range(50, 58)), 2, 4), (list(range(70, 75)), 3, 2)]
    step = exercise.python("flat_rows.py").flatten(chunks)
    assert step.token_ids == [19, 52, 53, 54, 55, 73, 74]
    assert step.positions == [9, 2, 3, 4, 5, 3, 4]
    assert step.query_start == [0, 1, 5, 7]
    assert step.context_len == [10, 6, 5]
    assert step.logits_rows == [0, 6]  # the second prompt goes on, so nothing is chosen after it


def test_no_row_is_padding(exercise: Exercise) -> None:
    rng = np.random.default_rng(15)
    chunks = []
    for _ in range(50):
        length = int(rng.integers(1, 40))
        start = int(rng.integers(0, length))
        chunks.append((list(range(length)), start, int(rng.integers(1, length - start + 1))))
    step = exercise.python("flat_rows.py").flatten(chunks)
    assert len(step.token_ids) == sum(count for _, _, count in chunks) == step.query_start[-1]
    assert step.token_ids == step.positions  # these tokens are numbered like their positions
    for r, (tokens, start, count) in enumerate(chunks):
        which = f"positions [{start}, {start + count}) of {len(tokens)} known tokens"
        assert step.query_start[r + 1] - step.query_start[r] == count, which
        assert step.context_len[r] == start + count, which
        last_is_known = start + count == len(tokens)
        has_logits = step.query_start[r + 1] - 1 in step.logits_rows
        assert has_logits == last_is_known, f"{which}: are the last row's logits wanted?"
