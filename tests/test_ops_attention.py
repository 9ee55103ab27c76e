"""Paged attention on every instruction set of this machine: its values, its awkward cases, and that no bit of
a row depends on anything but the row's own context."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from ops_reference import BFLOAT16, FLOAT32, AttentionCase, assert_close, assert_same_bits, wide
from tiny_vllm.errors import InvalidRequestError
from ways import every_isa, every_way, on

every_dtype = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)

# (context_len, new tokens): a decode, a first prefill, a chunk in the middle, one key, whole tiles.
MIXED = [(70, 1), (33, 33), (150, 20), (1, 1), (64, 2)]


def check(case: AttentionCase, way: str) -> None:
    expected = case.expected()
    assert np.abs(expected).max() > 0.1
    # A weighted mean: errors of the weights scale with the values, which are below 6.
    magnitude: Any = 6 * 8.0
    if way == "cuda" and case.dtype == BFLOAT16:
        # Tensor cores take the weights in bfloat16: each is off by 2^-8 of itself at most. assert_close
        # multiplies the magnitude by 2^-21.
        magnitude = magnitude + 2.0**13 * case.expected(absolute_values=True)
    assert_close(case.run(**on(way), num_threads=2), expected, case.dtype, ulps=0.6, magnitude=magnitude)


@every_way
@every_dtype
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 2), (5, 1), (70, 1), (1, 1)], ids=str)
def test_multi_head_grouped_and_multi_query(way: str, dtype: Any, heads: tuple[int, int]) -> None:
    check(AttentionCase(heads, 32, 16, MIXED if heads[0] < 20 else MIXED[:2], dtype=dtype), way)


@every_way
@every_dtype
@pytest.mark.parametrize("head_dim", [2, 16, 20, 64, 80, 96, 128, 256])
def test_head_dims(way: str, dtype: Any, head_dim: int) -> None:
    check(AttentionCase((4, 2), head_dim, 16, MIXED, dtype=dtype), way)


@every_way
@every_dtype
@pytest.mark.parametrize("block_size", [1, 5, 16, 24, 32, 200])
def test_block_sizes(way: str, dtype: Any, block_size: int) -> None:
    check(AttentionCase((4, 2), 32, block_size, MIXED, dtype=dtype), way)


@every_way
@every_dtype
@pytest.mark.parametrize("window", [1, 2, 7, 64, 100, 256, 1000])
def test_sliding_windows(way: str, dtype: Any, window: int) -> None:
    case = AttentionCase((4, 2), 32, 16, [(300, 1), (500, 90), (33, 33)], dtype=dtype, window=window)
    check(case, way)


@every_way
@every_dtype
def test_long_contexts_are_cut_and_merged(way: str, dtype: Any) -> None:
    check(AttentionCase((3, 1), 64, 16, [(1100, 1), (777, 2), (512, 1)], dtype=dtype), way)


@every_way
@every_dtype
def test_blocks_left_behind_by_the_window_are_not_read(way: str, dtype: Any) -> None:
    case = AttentionCase((4, 2), 32, 16, [(200, 3)], dtype=dtype, window=20)
    expected = case.run(**on(way))
    case.block_tables[0, : (197 - 19) // 16] = -1  # given back
    assert_same_bits(case.run(**on(way)), expected)


# ---- softmax rows that other engines stumbled over -------------------------------------------------------


@every_way
@every_dtype
def test_one_key_returns_its_value_exactly(way: str, dtype: Any) -> None:
    case = AttentionCase((4, 2), 64, 16, [(1, 1)], dtype=dtype, query_size=100.0)
    expected = np.repeat(case.values[0][0], 2, axis=0).reshape(1, -1)
    assert_same_bits(case.run(**on(way)), expected)


@every_way
@every_dtype
@pytest.mark.parametrize("score", [-6e4, -1e6, 7e4, 0.0])
def test_huge_scores(way: str, dtype: Any, score: float) -> None:
    """All keys the same, all scores `score`: the mean of the values, for one row and for a chunk."""
    for requests in ([(37, 1)], [(37, 37)], [(300, 2)]):
        case = AttentionCase((2, 1), 16, 16, requests, dtype=dtype, scale=score)
        case.qkv[:, :32] = np.tile([1] + [0] * 15, 2)
        for r in range(len(requests)):
            case.keys[r][:] = np.array([1] + [0] * 15)
        case.page(16)
        mean = [
            wide(case.values[0])[: requests[0][0] - requests[0][1] + i + 1, 0].mean(0)
            for i in range(requests[0][1])
        ]
        assert_close(case.run(**on(way)), np.tile(mean, (1, 2)), dtype, ulps=0.6, magnitude=48.0)


@every_way
@every_dtype
def test_scores_far_apart_and_below_any_finite_stand_in(way: str, dtype: Any) -> None:
    """One key stands out by 1e6, in turn in every tile: its value, although the others come first."""
    for at in (0, 63, 64, 200, 299):
        case = AttentionCase((2, 1), 16, 16, [(300, 1)], dtype=dtype, scale=1e6)
        case.qkv[:, :32] = np.tile([1] + [0] * 15, 2)
        case.keys[0][:] = np.array([-2] + [0] * 15)
        case.keys[0][at] = np.array([-1] + [0] * 15)
        case.page(16)
        assert_same_bits(case.run(**on(way)), np.tile(case.values[0][at], (1, 2)).reshape(1, -1))


@every_way
@every_dtype
def test_twenty_thousand_equal_scores(way: str, dtype: Any) -> None:
    count = 2000 if way == "reference" else 20_000  # the reference takes its time
    case = AttentionCase((1, 1), 16, 16, [(count, 1)], dtype=dtype)
    case.keys[0][:] = 0
    case.values[0] += np.array(1, dtype)
    case.page(16)
    mean = wide(case.values[0]).mean(0)
    # 20,000 additions in float: the sum of the values may lose some hundred units.
    assert_close(case.run(**on(way), num_threads=2), mean, dtype, ulps=0.6, magnitude=np.full((1, 16), 100.0))


@every_way
@every_dtype
def test_rows_without_keys_are_zero_and_touch_nobody(way: str, dtype: Any) -> None:
    case = AttentionCase((4, 2), 32, 16, [(0, 2), (40, 3), (0, 0)], dtype=dtype)
    result = case.run(**on(way), num_threads=2)
    assert (wide(result[:2]) == 0).all()
    alone = AttentionCase((4, 2), 32, 16, [(40, 3)], dtype=dtype)
    alone.keys, alone.values, alone.qkv = [case.keys[1]], [case.values[1]], case.qkv[2:]
    alone.page(16)
    assert_same_bits(result[2:], alone.run(**on(way)))


@every_isa
@every_dtype
def test_nan_stays_with_its_own_row(isa: str, dtype: Any) -> None:
    """A NaN query, and a NaN key and value of a later token, which no earlier row may notice."""
    case = AttentionCase((4, 2), 32, 16, [(90, 30), (50, 2)], dtype=dtype)
    clean = case.run(isa=isa)
    case.qkv[3, 32:64] = np.nan  # head 1 of one row
    case.keys[0][85] = np.nan  # position 85 is row 25
    case.values[0][87] = np.inf  # and 87 is row 27
    case.page(16)
    result = case.run(isa=isa)
    assert np.isnan(wide(result[3, 32:64])).all()
    assert not np.isfinite(wide(result[25:30])).any()
    rows = [*range(3), *range(4, 25), 30, 31]
    assert_same_bits(result[rows], clean[rows])
    assert_same_bits(np.delete(result[3], np.s_[32:64]), np.delete(clean[3], np.s_[32:64]))


# ---- the same bits, whatever else happens ----------------------------------------------------------------


@every_isa
@every_dtype
@pytest.mark.parametrize(("heads", "head_dim", "window"), [((9, 3), 64, 0), ((4, 1), 40, 50)], ids=str)
def test_a_row_has_the_same_bits_in_every_step(
    isa: str, dtype: Any, heads: tuple[int, int], head_dim: int, window: int
) -> None:
    """Prefilled at once, in chunks, or decoded; alone or with others; on 1 to 4 threads; in any blocks."""
    length = 70 if isa == "reference" else 330
    case = AttentionCase(heads, head_dim, 16, [(length, length)], dtype=dtype, window=window)
    whole = case.run(isa=isa, num_threads=1)

    for threads in (2, 3, 4):
        assert_same_bits(case.run(isa=isa, num_threads=threads), whole)
    for block_size in (1, 7, 16, 48, 64):
        case.page(block_size)
        assert_same_bits(case.run(isa=isa, num_threads=2), whole)

    for chunks in ([1, 16, 17, 30], [64, 128, 256, 300], [5, 60, 61, 62, 63, 65, 257], range(1, length, 13)):
        borders = [0, *(c for c in chunks if c < length), length]
        for first, end in itertools.pairwise(borders):
            assert_same_bits(part(case, first, end).run(isa=isa, num_threads=2), whole[first:end])

    # As one step with others before and after it.
    some = [(10, 20), (length - 1, length), (40, 45)]
    parts = [part(case, *borders) for borders in some]
    together = AttentionCase(heads, head_dim, 16, [p.requests[0] for p in parts], dtype=dtype, window=window)
    together.keys, together.values = [p.keys[0] for p in parts], [p.values[0] for p in parts]
    together.qkv = np.concatenate([p.qkv for p in parts])
    together.page(16)
    expected = np.concatenate([whole[first:end] for first, end in some])
    assert_same_bits(together.run(isa=isa, num_threads=3), expected)


def part(case: AttentionCase, first: int, end: int) -> AttentionCase:
    """Tokens [first, end) of a case with one request, as a step of their own: later ones do not exist yet."""
    p = AttentionCase(
        case.heads, case.head_dim, 16, [(end, end - first)], dtype=case.dtype, window=case.window
    )
    p.keys, p.values = [case.keys[0][:end]], [case.values[0][:end]]
    p.qkv = case.qkv[first:end].copy()
    p.page(16)
    return p


@every_isa
@every_dtype
def test_one_long_decode_on_many_threads(isa: str, dtype: Any) -> None:
    """Its context is cut among the threads; on one thread it is not."""
    case = AttentionCase((3, 1), 64, 16, [(1300, 1)], dtype=dtype)
    alone = case.run(isa=isa, num_threads=1)
    for threads in (2, 3, 4, 7):
        assert_same_bits(case.run(isa=isa, num_threads=threads), alone)


def test_impossible_batches_are_refused_by_name() -> None:
    case = AttentionCase((4, 2), 32, 16, [(40, 3)], dtype=FLOAT32)
    case.query_start = np.array([0, 2])
    with pytest.raises(InvalidRequestError, match="query_start must rise from 0 to 3"):
        case.run()
    case = AttentionCase((4, 2), 32, 16, [(40, 3)], dtype=FLOAT32)
    case.block_tables[0, 1] = 99
    with pytest.raises(Exception, match="block 99 of"):
        case.run()
    case = AttentionCase((4, 2), 32, 16, [(40, 3)], dtype=FLOAT32)
    case.heads = (3, 2)
    with pytest.raises(InvalidRequestError, match="3 query heads cannot share 2"):
        case.run()
    case = AttentionCase((4, 2), 32, 16, [(400, 1)], dtype=FLOAT32)
    case.block_tables = case.block_tables[:, :5]
    with pytest.raises(Exception, match="needs 25 blocks, the block table has 5"):
        case.run()
