"""Exercises 18.1 and 18.2: attention through block tables, against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Exercise

UNWRITTEN = np.float32(-1e30)


class Case:
    """Requests in a paged cache. All that is in no request's context is poisoned."""

    def __init__(
        self, contexts: list[int], heads: int, kv_heads: int, dim: int, block_size: int, scale: float = 1
    ) -> None:
        rng = np.random.default_rng(sum(contexts) + heads + dim)
        needed = [-(-context // block_size) for context in contexts]
        self.context = np.array(contexts, np.int32)
        num_blocks = sum(needed) + 3
        order = rng.permutation(num_blocks)
        width = max(needed) + 1
        self.tables = np.full((len(contexts), width), -(2**30), np.int32)  # no such block: do not look there
        shape = (num_blocks, kv_heads, block_size, dim)
        self.keys, self.values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        self.query = (scale * rng.standard_normal((len(contexts), heads, dim))).astype(np.float32)
        self.expected = np.zeros(self.query.shape)
        taken = 0
        for r, context in enumerate(contexts):
            self.tables[r, : needed[r]] = order[taken : taken + needed[r]]
            taken += needed[r]
            k = rng.standard_normal((context, kv_heads, dim)).astype(np.float32)
            v = rng.standard_normal((context, kv_heads, dim)).astype(np.float32)
            for p in range(context):
                block, offset = self.tables[r, p // block_size], p % block_size
                self.keys[block, :, offset], self.values[block, :, offset] = k[p], v[p]
            for head in range(heads if context else 0):
                kv_head = head // (heads // kv_heads)
                query = self.query[r, head].astype(np.float64)
                scores = k[:, kv_head].astype(np.float64) @ query / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                self.expected[r, head] = weights @ v[:, kv_head] / weights.sum()

    def check(self, library: Any) -> None:
        out = np.full(self.query.shape, UNWRITTEN, np.float32)
        requests, heads, dim = self.query.shape
        num_blocks, kv_heads, block_size, _ = self.keys.shape
        library("paged_attention", self.query, self.keys, self.values, self.tables, self.context, out,
                requests, heads, kv_heads, dim, num_blocks, block_size, self.tables.shape[1])  # fmt: skip
        for r, context in enumerate(self.context):
            message = f"request {r}, with {context} keys"
            unwritten, has_nan = bool((out[r] == UNWRITTEN).any()), bool(np.isnan(out[r]).any())
            assert not unwritten, f"{message}: not all of its result was written"
            assert not has_nan, (
                f"{message}: NaN. Was a place read that it has no key in, or a sum of 0 divided by?"
            )
            np.testing.assert_allclose(out[r], self.expected[r], rtol=1e-4, atol=1e-5, err_msg=message)


@pytest.fixture(params=["paged_attention.cu", "paged_attention.cpp"])
def library(request: pytest.FixtureRequest, exercise: Exercise) -> Any:
    return exercise.kernels(request.param)


def test_one_key_is_its_value(library: Any) -> None:
    Case([1], heads=1, kv_heads=1, dim=32, block_size=4).check(library)


def test_several_blocks_out_of_order(library: Any) -> None:
    Case([19], heads=1, kv_heads=1, dim=32, block_size=4).check(library)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_ragged_contexts(library: Any, block_size: int) -> None:
    Case([5, 16, 1, 17, 0, 33], heads=2, kv_heads=2, dim=32, block_size=block_size).check(library)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3), (3, 1)])
def test_query_heads_share_a_kv_head(library: Any, heads: int, kv_heads: int) -> None:
    Case([6, 11], heads=heads, kv_heads=kv_heads, dim=64, block_size=4).check(library)


@pytest.mark.parametrize("dim", [96, 128])
def test_a_wide_head(library: Any, dim: int) -> None:
    Case([9, 3], heads=2, kv_heads=1, dim=dim, block_size=8).check(library)


@pytest.mark.parametrize("dim", [1, 7, 33, 200])
def test_any_head_on_a_cpu(exercise: Exercise, dim: int) -> None:
    Case([9, 3], heads=2, kv_heads=1, dim=dim, block_size=4).check(exercise.kernels("paged_attention.cpp"))


def test_a_long_context(library: Any) -> None:
    Case([2, 3000], heads=1, kv_heads=1, dim=32, block_size=16).check(library)


@pytest.mark.parametrize("scale", [100, 1000])
def test_large_scores(library: Any, scale: float) -> None:
    Case([12, 7], heads=2, kv_heads=2, dim=32, block_size=4, scale=scale).check(library)
    # Some of these contexts have scores far below 0, and no others.
    Case([1, 1, 2, 1, 1, 2], heads=2, kv_heads=2, dim=32, block_size=4, scale=scale).check(library)
