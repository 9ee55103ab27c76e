"""Exercise 17.2: the layout of a step, and whether the engine's kernels find everything through it."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm import ops


@pytest.fixture
def module(exercise: Exercise) -> ModuleType:
    return exercise.python("batch_layout.py")


def test_a_prefill_a_chunk_and_a_decode(module: ModuleType) -> None:
    tables = [7, 2], [5, 1, 3], [4]
    layout = module.lay_out([(tables[0], 0, 6), (tables[1], 7, 2), (tables[2], 3, 1)], 4)
    assert layout.positions == [0, 1, 2, 3, 4, 5, 7, 8, 3]
    assert layout.slots == [28, 29, 30, 31, 8, 9, 7, 12, 19]
    assert layout.query_start == [0, 6, 8, 9]
    assert layout.context_len == [6, 9, 4]
    assert layout.tables == [[7, 2, 0], [5, 1, 3], [4, 0, 0]]
    assert (tables[0], tables[2]) == ([7, 2], [4]), "the requests' own tables have been changed"


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_attention_finds_what_was_written(module: ModuleType, block_size: int) -> None:
    """Prompts in random chunks, through one cache; attention then sees each request's own tokens only."""
    draw = random.Random(block_size)
    rng = np.random.default_rng(block_size)
    lengths = [5, 17, 30]
    free = list(range(60))
    draw.shuffle(free)
    tables = [[free.pop() for _ in range(-(-n // block_size))] for n in lengths]
    keys = np.full((60, 1, block_size, 4), np.nan, np.float32)
    values = keys.copy()
    rows = [rng.standard_normal((n, 12)).astype(np.float32) for n in lengths]  # q, k, v of one head
    out: list[list[Any]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    while done != lengths:
        who = [r for r in range(3) if done[r] < lengths[r]]
        counts = [draw.randint(1, lengths[r] - done[r]) for r in who]
        layout = module.lay_out(
            [(tables[r], done[r], count) for r, count in zip(who, counts, strict=True)], block_size
        )
        qkv = np.concatenate([rows[r][done[r] : done[r] + n] for r, n in zip(who, counts, strict=True)])
        still = np.tile(np.float32([1, 0]), (len(qkv), 2, 1))  # an angle of 0: nothing is turned
        qkv, keys, values = ops.rope_and_cache(
            qkv, keys, values, slot_mapping=layout.slots, cos_sin=still, num_heads=1
        )
        result = ops.paged_attention(
            qkv,
            keys,
            values,
            block_tables=layout.tables,
            context_len=layout.context_len,
            query_start=layout.query_start,
            num_heads=1,
        )
        for i, r in enumerate(who):
            out[r].extend(result[layout.query_start[i] : layout.query_start[i + 1]])
            done[r] += counts[i]
    for r, n in enumerate(lengths):
        q, k, v = rows[r][:, :4], rows[r][:, 4:8], rows[r][:, 8:]
        weights = np.tril(np.exp(q @ k.T / 2))
        expected = weights / weights.sum(axis=1, keepdims=True) @ v
        np.testing.assert_allclose(np.array(out[r]), expected, rtol=1e-4, atol=1e-5, err_msg=f"{n} tokens")
