"""Exercise 14.1: the same rows, whichever way the text is cut, against the engine's attention."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm import ops

ROWS, HEADS, KV_HEADS, DIM = 12, 6, 2, 8


@pytest.mark.parametrize("cuts", [[12], [1] * 12, [5, 1, 4, 2], [11, 1]])
def test_it_does_not_matter_how_the_text_is_cut(exercise: Exercise, cuts: list[int]) -> None:
    rng = np.random.default_rng(14)
    q = rng.standard_normal((ROWS, HEADS, DIM)).astype(np.float32)
    k, v = (rng.standard_normal((ROWS, KV_HEADS, DIM)).astype(np.float32) for _ in range(2))
    heads = [np.concatenate([a[t].reshape(-1) for a in (q, k, v)]) for t in range(ROWS)]
    # The engine's cache: one block of 12 rows, (1, Hk, 12, Dh).
    expected = ops.paged_attention(
        np.stack(heads),
        np.ascontiguousarray(k.transpose(1, 0, 2))[None],
        np.ascontiguousarray(v.transpose(1, 0, 2))[None],
        num_heads=HEADS,
        block_tables=[[0]],
        context_len=[ROWS],
        query_start=[0, ROWS],
    ).reshape(ROWS, HEADS, DIM)

    cache = exercise.python("kv_cache.py").KvCache(KV_HEADS, DIM, ROWS)
    room_q, room_k, room_v = np.empty_like(q), np.empty_like(k), np.empty_like(v)  # used again and again
    first = 0
    for rows in cuts:
        for room, source in ((room_q, q), (room_k, k), (room_v, v)):
            room[:rows] = source[first : first + rows]
        found = cache.attend(room_q[:rows], room_k[:rows], room_v[:rows])
        np.testing.assert_allclose(found, expected[first : first + rows], rtol=1e-4, atol=1e-5)
        first += rows


def test_what_does_not_fit_changes_nothing(exercise: Exercise) -> None:
    cache = exercise.python("kv_cache.py").KvCache(1, 2, 3)
    row = np.ones((1, 1, 2), np.float32)
    cache.attend(row, row, row)
    three = np.full((3, 1, 2), 7, np.float32)
    with pytest.raises(ValueError):  # noqa: PT011 - the message is the reader's
        cache.attend(three, three, three)
    np.testing.assert_allclose(cache.attend(row, row, 3 * row), 2 * row)  # the mean of 1 and 3


def test_two_caches_are_two(exercise: Exercise) -> None:
    module = exercise.python("kv_cache.py")
    first, second = module.KvCache(1, 2, 3), module.KvCache(1, 2, 3)
    row = np.ones((1, 1, 2), np.float32)
    found = first.attend(row, row, row)
    np.testing.assert_allclose(second.attend(row, row, 5 * row), 5 * row)
    np.testing.assert_allclose(first.attend(row, row, 3 * row), 2 * row)
    np.testing.assert_allclose(found, row, err_msg="an earlier result has been changed")
