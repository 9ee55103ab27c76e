"""Each op of the CPU backend, on every instruction set of this machine, against float64.

Sizes are awkward on purpose: one row, a prime number of them, widths that fill no vector. Outputs are full
of NaN before an op runs (tiny_vllm.ops does that), so that a place which an op forgets is seen.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ops_reference as reference
import pytest
from ops_reference import BFLOAT16, FLOAT32, assert_close, assert_same_bits, random, rounded, wide
from tiny_vllm import _core, ops
from tiny_vllm.errors import DeviceError, InvalidRequestError
from ways import ISAS, every_isa, every_way, on

DTYPES = [BFLOAT16, FLOAT32]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_the_best_isa_is_found_and_named() -> None:
    assert ISAS[-2:] == ["portable", "reference"]
    assert len(set(ISAS)) == len(ISAS)
    with pytest.raises(DeviceError, match=r"cpu_isa is 'mmx'.*auto, .*portable, reference"):
        ops.embedding(np.zeros((1, 1), np.float32), [0], isa="mmx")


# ---- matmul ----------------------------------------------------------------------------------------------

# M, N, K: around the tiles of every instruction set (4, 16, 32 rows and columns, 16 and 32 of K), and beyond.
MATMUL_SHAPES = [
    (1, 1, 1),
    (1, 19, 99),
    (2, 15, 2),
    (3, 16, 31),
    (4, 17, 32),
    (5, 31, 33),
    (15, 32, 64),
    (16, 33, 65),
    (17, 64, 127),
    (33, 65, 96),
    (19, 100, 576),
    (99, 48, 200),
    (989, 19, 37),
    (1, 99, 8200),
    (7, 4300, 72),
]


@every_way
@every_dtype
@pytest.mark.parametrize("shape", MATMUL_SHAPES, ids=str)
def test_matmul(way: str, dtype: Any, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, weight, bias = random(1, (m, k), dtype), random(2, (n, k), dtype), random(3, (n,), dtype)
    expected = wide(x) @ wide(weight).T
    magnitude = np.abs(wide(x)) @ np.abs(wide(weight)).T + np.abs(wide(bias))
    assert np.abs(expected).max() > 1e-3
    for out_dtype, b in itertools.product({dtype, FLOAT32}, (None, bias)):
        result = ops.matmul(x, weight, b, out_dtype=out_dtype, **on(way), num_threads=2)
        assert result.dtype == out_dtype
        with_bias = expected if b is None else expected + wide(bias)
        assert_close(result, with_bias, out_dtype, ulps=0.51, magnitude=magnitude * np.sqrt(k))


@every_isa
@every_dtype
def test_a_row_of_a_matmul_has_the_same_bits_in_every_batch(isa: str, dtype: Any) -> None:
    """One row or many, wherever it stands, on any number of threads."""
    n, k, rows = 77, 150, 67
    x, weight, bias = random(1, (rows, k), dtype), random(2, (n, k), dtype), random(3, (n,), dtype)
    together = ops.matmul(x, weight, bias, isa=isa, num_threads=1)
    for count in (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 48, 64, 65):
        for first in (0, 1, rows - count):
            some = ops.matmul(x[first : first + count], weight, bias, isa=isa, num_threads=1 + count % 4)
            assert_same_bits(some, together[first : first + count])
    assert_same_bits(ops.matmul(x[::-1].copy(), weight, bias, isa=isa)[::-1].copy(), together)
    for first, end in ((0, 1), (5, 40), (64, 77)):  # and columns among others, or alone
        some = ops.matmul(x, weight[first:end], bias[first:end], isa=isa, num_threads=3)
        assert_same_bits(some, together[:, first:end].copy())


@every_way
@every_dtype
def test_matmul_keeps_nan_and_infinity_in_their_row(way: str, dtype: Any) -> None:
    x, weight = random(1, (20, 40), dtype, outliers=False), random(2, (33, 40), dtype, outliers=False)
    clean = ops.matmul(x, weight, **on(way))
    x[3, 7], x[11, 0] = np.nan, np.inf
    result = ops.matmul(x, weight, **on(way))
    assert np.isnan(wide(result[3])).all()
    assert not np.isfinite(wide(result[11])).any()
    others = [r for r in range(20) if r not in (3, 11)]
    assert_same_bits(result[others], clean[others])


@every_way
@every_dtype
@pytest.mark.parametrize("shape", MATMUL_SHAPES, ids=str)
def test_matmul_add(way: str, dtype: Any, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, weight, bias = random(1, (m, k), dtype), random(2, (n, k), dtype), random(3, (n,), dtype)
    out = random(4, (m, n), dtype)
    for b in (None, bias):
        product = ops.matmul(x, weight, b, **on(way))
        result = ops.matmul_add(out, x, weight, b, **on(way), num_threads=2)
        if "device" not in on(way):  # the product is rounded, and then the sum
            assert_same_bits(result, rounded(wide(out) + wide(product), dtype).astype(dtype))
        exact = wide(x) @ wide(weight).T + (0 if b is None else wide(bias))
        magnitude = np.abs(wide(x)) @ np.abs(wide(weight)).T + np.abs(wide(bias))
        lost = magnitude * np.sqrt(k) + np.abs(exact) * reference.EPSILON[np.dtype(dtype)] * 2.0**20
        assert_close(result, wide(out) + exact, dtype, ulps=0.51, magnitude=lost)


# M, N, D: a few rows and many, with and without whole vectors, and more than a multiprocessor has room for.
NORM_MATMUL_SHAPES = [
    (1, 96, 2048),
    (2, 6, 8),
    (3, 48, 576),
    (8, 160, 256),
    (9, 64, 264),
    (16, 32, 1024),
    (1, 40, 8200),
    (8, 18, 8200),
    (5, 24, 99),
    (40, 66, 128),
    (3, 4500, 264),
]


@every_way
@every_dtype
@pytest.mark.parametrize("shape", NORM_MATMUL_SHAPES, ids=str)
def test_norm_matmul(way: str, dtype: Any, shape: tuple[int, int, int]) -> None:
    m, n, dim = shape
    x, weight, bias = random(1, (m, dim), dtype), random(2, (n, dim), dtype), random(3, (n,), dtype)
    norm_weight = random(4, (dim,), dtype, outliers=False)
    normed = reference.rms_norm(x, norm_weight, 1e-5)
    magnitude = np.abs(normed) @ np.abs(wide(weight)).T + np.abs(wide(bias))
    for b in (None, bias):
        result = ops.norm_matmul(x, norm_weight, weight, b, **on(way), num_threads=2)
        exact = normed @ wide(weight).T + (0 if b is None else wide(bias))
        # A normalised element may fall on the other side of a rounding border: see check_norm.
        flips = magnitude * reference.EPSILON[np.dtype(dtype)] / (4 * reference.EPSILON[np.dtype(FLOAT32)])
        assert_close(result, exact, dtype, ulps=0.51, magnitude=magnitude * np.sqrt(dim) + 2 * flips)
        apart = ops.matmul(ops.rms_norm(x, norm_weight, **on(way)), weight, b, **on(way))
        if "device" not in on(way):
            assert_same_bits(result, apart)
        elif dtype == BFLOAT16:
            assert (wide(result) == wide(apart)).mean() > 0.9
        for activation in ("silu", "gelu", "gelu_tanh"):
            gated = ops.norm_matmul(x, norm_weight, weight, b, activation=activation, **on(way))
            assert_same_bits(gated, ops.act_mul(result, activation, **on(way)))


# ---- norms -----------------------------------------------------------------------------------------------


@every_way
@every_dtype
@pytest.mark.parametrize("dim", [1, 15, 99, 256, 4096])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm_rounds_where_hugging_face_rounds(
    way: str, dtype: Any, dim: int, size: float, eps: float
) -> None:
    x = (size * wide(random(1, (19, dim), dtype))).astype(dtype)
    weight = random(3, (dim,), dtype, outliers=False)
    result = ops.rms_norm(x, weight, eps, **on(way), num_threads=2)
    check_norm(result, reference.rms_norm(x, weight, eps), dtype)


def check_norm(result: Any, expected: Any, dtype: Any) -> None:
    """Equal, but where 1/rms in float falls on the other side of a rounding border than 1/rms in double: one
    unit of the normalised value, which the weight can make two."""
    assert_close(result, expected, dtype, ulps=2.0 if dtype == BFLOAT16 else 4.0)
    if dtype == BFLOAT16:
        assert (wide(result) == expected).mean() > 0.99


def test_the_norm_test_can_tell_the_orders_of_rounding_apart() -> None:
    """With one rounding at the end check_norm would fail."""
    x = random(1, (99, 256), BFLOAT16)
    weight = random(3, (256,), BFLOAT16, outliers=False)
    rows = wide(x)
    once = rounded(rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5) * wide(weight), BFLOAT16)
    assert (once == reference.rms_norm(x, weight, 1e-5)).mean() < 0.9


@every_way
@every_dtype
def test_rms_norm_of_many_rows_of_zeros_and_of_itself(way: str, dtype: Any) -> None:
    x, weight = random(1, (989, 48), dtype), random(2, (48,), dtype)
    x[17] = 0
    result = ops.rms_norm(x, weight, **on(way), num_threads=2)
    assert (wide(result[17]) == 0).all()
    for row in (0, 17, 500, 988):
        assert_same_bits(
            ops.rms_norm(x[row : row + 1], weight, **on(way), num_threads=1), result[row : row + 1]
        )


# ---- feed-forward gate -----------------------------------------------------------------------------------


@every_way
@every_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 19), (19, 99), (99, 64), (989, 17)], ids=str)
def test_act_mul(way: str, dtype: Any, activation: str, shape: tuple[int, int]) -> None:
    rows, width = shape
    gate_up = random(1, (rows, 2 * width), dtype)
    gate_up[:, :width] = np.resize(
        np.array([0, -0.0, 1e-30, -1e-4, 3, -3, 20, -20, 88, -88, 1e4, -1e4]), width
    )
    gate_up[1:, :width] = random(2, (rows - 1, width), dtype)
    result = ops.act_mul(gate_up, activation, **on(way), num_threads=2)
    expected = reference.act_mul(gate_up, activation)
    up = np.abs(wide(gate_up[:, width:]))
    assert rows * width < 100 or np.abs(expected).max() > 1
    # gelu far below zero is a difference of nearly equal numbers: off by an epsilon of the number itself.
    lost = np.abs(wide(gate_up[:, :width])) * up * (0.5 if activation != "silu" else 0.02)
    assert_close(result, expected, dtype, ulps=1.01 if dtype == BFLOAT16 else 8.0, magnitude=lost)


# ---- rope and the cache ----------------------------------------------------------------------------------


@every_way
@every_dtype
@pytest.mark.parametrize("head_dim", [2, 20, 64, 96, 128])
@pytest.mark.parametrize("norms", [False, True])
def test_rope_and_cache(way: str, dtype: Any, head_dim: int, norms: bool) -> None:
    tokens, num_heads, kv_heads, block_size, blocks = 19, 6, 2, 5, 9
    qkv = random(1, (tokens, (num_heads + 2 * kv_heads) * head_dim), dtype, outliers=False)
    keys = random(2, (blocks, kv_heads, block_size, head_dim), dtype)
    values = random(3, keys.shape, dtype)
    positions = [0, 1, 2, 17, 63, 199, *range(1000, 1013)]
    slots = np.random.default_rng(4).permutation(blocks * block_size)[:tokens]
    q_norm, k_norm = (random(s, (head_dim,), dtype, outliers=False) for s in (5, 6))
    new_qkv, new_keys, new_values = ops.rope_and_cache(
        qkv, keys, values, slot_mapping=slots, cos_sin=reference.angles(positions, head_dim),
        num_heads=num_heads, q_norm=q_norm if norms else None, k_norm=k_norm if norms else None, eps=1e-6,
        **on(way), num_threads=2,
    )  # fmt: skip

    heads = qkv.reshape(tokens, -1, head_dim)
    q, k, v = np.split(heads, [num_heads, num_heads + kv_heads], axis=1)
    if norms:
        q, k = (
            reference.rms_norm(q, q_norm, 1e-6).astype(dtype),
            reference.rms_norm(k, k_norm, 1e-6).astype(dtype),
        )
    cos_sin = reference.angles(positions, head_dim)
    got_q = new_qkv.reshape(tokens, -1, head_dim)[:, :num_heads]
    half = head_dim // 2
    for got, given, turned in (
        (got_q, q, reference.rope(q, cos_sin)),
        (new_keys[slots // block_size, :, slots % block_size], k, reference.rope(k, cos_sin)),
    ):
        pair = np.abs(wide(given)) + np.abs(np.roll(wide(given), half, axis=-1))
        assert_close(got, turned, dtype, ulps=0.51, magnitude=pair * (1 if not norms else 2.0**16 * 4))
        if not norms:  # a turn keeps the length; position 0 does not turn at all
            assert_same_bits(np.ascontiguousarray(got[0]), np.ascontiguousarray(given[0]))

    # Values are copied as they are, nothing else in the cache is touched, and keys and values of qkv stay.
    expected_values, touched = values.copy(), np.zeros((blocks, block_size), bool)
    expected_values[slots // block_size, :, slots % block_size] = v
    touched[slots // block_size, slots % block_size] = True
    assert_same_bits(new_values, expected_values)
    untouched = ~touched
    assert_same_bits(new_keys.swapaxes(1, 2)[untouched], keys.swapaxes(1, 2)[untouched])
    rest = new_qkv.reshape(tokens, -1, head_dim)[:, num_heads + kv_heads :]
    assert_same_bits(np.ascontiguousarray(rest), np.ascontiguousarray(v))


# ---- copies ----------------------------------------------------------------------------------------------


@every_way
@every_dtype
@pytest.mark.parametrize("count", [0, 1, 19, 989])
def test_embedding_and_gather_rows(way: str, dtype: Any, count: int) -> None:
    table = random(1, (50, 33), dtype)
    ids = np.random.default_rng(2).integers(0, 50, count)
    assert_same_bits(ops.embedding(table, ids, **on(way), num_threads=2), table[ids])
    assert_same_bits(ops.gather_rows(table, ids, **on(way), num_threads=2), table[ids])


@every_dtype
def test_copy_block(dtype: Any) -> None:
    keys, values = random(1, (5, 2, 4, 6), dtype), random(2, (5, 2, 4, 6), dtype)
    new_keys, new_values = ops.copy_block(keys, values, 3, 0)
    keys[0], values[0] = keys[3], values[3]
    assert_same_bits(new_keys, keys)
    assert_same_bits(new_values, values)


# ---- all of them -----------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("pair", [("avx2", "avx512")], ids=str)
def test_vectors_of_other_widths_give_the_same_bits(dtype: Any, pair: tuple[str, str]) -> None:
    """Vec has sixteen lanes everywhere and every sum one order, so AVX2 and AVX-512 cannot be told apart."""
    if not set(pair) <= set(ISAS):
        pytest.skip(f"this machine runs {ISAS}, not both of {pair}")
    x, weight = random(1, (9, 150), dtype), random(2, (40, 150), dtype)
    case = reference.AttentionCase((6, 2), 40, 16, [(300, 20), (77, 1)], dtype=dtype)
    results = [
        [
            ops.matmul(x, weight, isa=isa),
            ops.rms_norm(x, weight[0], isa=isa),
            ops.act_mul(x, "silu", isa=isa),
            ops.act_mul(x, "gelu_tanh", isa=isa),
            case.run(isa=isa),
        ]
        for isa in pair
    ]
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_wrong_shapes_and_types_are_refused_by_name() -> None:
    x, weight = np.zeros((2, 4), np.float32), np.zeros((3, 4), np.float32)
    refused = [
        (lambda: ops.matmul(x, weight[:, :3]), "x has 4 columns, but weight 3"),
        (lambda: ops.matmul(x, weight.astype(BFLOAT16)), "weight is bfloat16, but x is float32"),
        (lambda: ops.matmul(x.astype(np.float64), weight), "x is float64"),
        (lambda: ops.matmul(x, weight, np.zeros(4, np.float32)), "bias has shape"),
        (lambda: ops.matmul(x, weight, out_dtype=BFLOAT16), "out_dtype is bfloat16"),
        (lambda: ops.rms_norm(x, np.zeros(3, np.float32)), "weight has shape"),
        (lambda: ops.matmul_add(x, x, weight), "out has shape"),
        (
            lambda: ops.matmul_add(x[:, :3], x, weight.astype(BFLOAT16)),
            "weight is bfloat16, but x is float32",
        ),
        (lambda: ops.norm_matmul(x, weight[0, :3], weight), "norm_weight has shape"),
        (
            lambda: ops.norm_matmul(x, weight[0], weight, activation="silu"),
            "weight has 3 rows, expected an even",
        ),
        (lambda: ops.norm_matmul(x, weight[0], weight[:2], activation="relu"), "activation is 'relu'"),
        (lambda: ops.act_mul(np.zeros((2, 3), np.float32)), "gate_up has shape"),
        (lambda: ops.act_mul(x, "relu"), "activation is 'relu'"),
        (lambda: ops.embedding(x, [2]), "row 2 of a table with 2 rows"),
        (lambda: ops.embedding(x, [-1]), "row -1"),
        (lambda: ops.rms_norm(x, weight[0], device="tpu"), "device is 'tpu'"),
        (lambda: ops.rms_norm(x, weight[0], num_threads=-1), "num_threads is -1"),
    ]
    for call, message in refused:
        with pytest.raises((InvalidRequestError, DeviceError), match=message):
            call()


def _paged(**changed: Any) -> Any:
    """A small call of paged_attention, with other arguments here and there."""
    cache = np.zeros((4, 1, 4, 4), np.float32)
    arguments: dict[str, Any] = {
        "qkv": np.zeros((3, 16), np.float32),
        "keys": cache,
        "values": cache,
        "block_tables": [[0, 1]],
        "context_len": [5],
        "query_start": [0, 3],
        "num_heads": 2,
    }
    return ops.paged_attention(**{**arguments, **changed})


def _roped(**changed: Any) -> Any:
    cache = np.zeros((4, 1, 4, 4), np.float32)
    arguments: dict[str, Any] = {
        "qkv": np.zeros((3, 16), np.float32),
        "keys": cache,
        "values": cache,
        "slot_mapping": [0, 1, 15],
        "cos_sin": np.zeros((3, 2, 2), np.float32),
        "num_heads": 2,
    }
    return ops.rope_and_cache(**{**arguments, **changed})


@pytest.mark.parametrize("shape", [(4, 1, 0, 4), (0, 1, 4, 4)], ids=str)
def test_a_cache_without_tokens_is_refused(shape: tuple[int, ...]) -> None:
    cache = np.zeros(shape, np.float32)
    for call in (_paged, _roped):
        with pytest.raises(InvalidRequestError, match=r"keys has shape .*, expected 1 or more blocks"):
            call(keys=cache, values=cache)


def test_the_core_refuses_a_block_size_of_0() -> None:
    """Also without ops.py before it: a division by 0 ends the process."""
    empty = np.zeros(0, np.int32)
    with pytest.raises(InvalidRequestError, match="block_size must be 1 or more"):
        _core.OpsBatch(
            query_start=np.array([0]),
            context_len=empty,
            block_tables=empty,
            slot_mapping=empty,
            cos_sin=empty,
            num_heads=1,
            num_kv_heads=1,
            head_dim=4,
            block_size=0,
        )


@pytest.mark.parametrize(
    "rows",
    [
        [1.9],
        [True],
        ["a"],
        [None],
        None,
        [float("nan")],
        np.array([2**32 + 1]),
        [2**64],
        [[0], [0, 1]],
        1,
        [[1]],
    ],
    ids=str,
)
def test_rows_that_are_not_whole_numbers_are_refused(rows: Any) -> None:
    x = np.zeros((4, 8), np.float32)
    with pytest.raises(InvalidRequestError, match=r"^rows "):
        ops.gather_rows(x, rows)
    with pytest.raises(InvalidRequestError, match=r"^ids "):
        ops.embedding(x, rows)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_tables", [[0.5, 1]]),
        ("block_tables", [[2**32, 1]]),
        ("block_tables", None),
        ("context_len", [5.5]),
        ("context_len", [2**32 + 5]),
        ("context_len", [-1]),
        ("context_len", [2]),  # fewer than its three rows
        ("context_len", 5),
        ("query_start", [0, 3.0]),
        ("query_start", None),
        ("num_heads", 2.0),
        ("num_heads", 0),
        ("num_heads", "a"),
        ("sliding_window", 1.5),
        ("sliding_window", 2**63),
        ("scale", float("nan")),
        ("scale", "a"),
        ("keys", None),
        ("values", [0.0]),
    ],
    ids=str,
)
def test_wrong_arguments_of_attention_are_refused_by_name(name: str, value: Any) -> None:
    _paged()
    with pytest.raises(InvalidRequestError, match=rf"^{name}\b"):
        _paged(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slot_mapping", [0.5, 1, 2]),
        ("slot_mapping", [2**63, 1, 2]),
        ("slot_mapping", None),
        ("cos_sin", "a"),
        ("cos_sin", None),
        ("eps", float("nan")),
        ("eps", -1),
        ("q_norm", [1, 2, 3, 4]),
        ("num_heads", 2.0),
        ("qkv", None),
    ],
    ids=str,
)
def test_wrong_arguments_of_rope_are_refused_by_name(name: str, value: Any) -> None:
    _roped()
    with pytest.raises(InvalidRequestError, match=rf"^{name}\b"):
        _roped(**{name: value})


def test_wrong_scalars_and_missing_arrays_are_refused_by_name() -> None:
    x, weight = np.zeros((2, 4), np.float32), np.zeros(4, np.float32)
    cache = np.zeros((2, 1, 4, 4), np.float32)
    nothing: Any = None
    refused: list[tuple[Any, str]] = [
        (lambda v=v: ops.rms_norm(x, weight, v), "eps is ")
        for v in (float("nan"), float("inf"), -1e-5, 1e39, "x", None, True, 10**5000)
    ]
    refused += [
        (lambda: ops.norm_matmul(x, weight, x, eps=-1), "eps is -1"),
        (lambda: ops.rms_norm(nothing, weight), "x is of type NoneType, expected a numpy array"),
        (lambda: ops.rms_norm(x, [1.0] * 4), "weight is of type list"),
        (lambda: ops.matmul_add(nothing, x, x), "out is of type NoneType"),
        (lambda: ops.norm_matmul(x, nothing, x), "norm_weight is of type NoneType"),
        (lambda: ops.matmul(x, nothing), "weight is of type NoneType"),
        (lambda: ops.matmul(x, x, [1.0]), "bias is of type list"),
        (lambda: ops.matmul(x, x, out_dtype="zzz"), "out_dtype is 'zzz'"),
        (lambda: ops.act_mul(x, nothing), "activation is None"),
        (lambda: ops.embedding(nothing, [0]), "table is of type NoneType"),
        (lambda: ops.copy_block(cache, cache, 0.5, 0), "src is 0.5, expected a whole number from 0 to 1"),
        (lambda: ops.copy_block(cache, cache, 0, 2), "dst is 2, expected a whole number from 0 to 1"),
        (lambda: ops.rms_norm(x, weight, isa=nothing), "isa is None, expected text"),
        (lambda: ops.rms_norm(x, weight, device=[]), "device is"),
        (lambda: ops.rms_norm(x, weight, num_threads=2**40), "num_threads is 1099511627776"),
        (lambda: ops.rms_norm(x, weight, num_threads=1.5), "num_threads is 1.5"),
        (lambda: ops.measure_read_bandwidth("a"), "num_threads is 'a'"),
        (lambda: ops.measure_read_bandwidth(-1), "num_threads is -1"),
        (lambda: ops.measure_read_bandwidth(10**5000), "num_threads is a value of type int"),
    ]
    for call, message in refused:
        with pytest.raises(InvalidRequestError, match=message):
            call()


def test_non_contiguous_arrays_are_taken_as_they_look() -> None:
    x, weight = random(1, (8, 20), FLOAT32), random(2, (6, 20), FLOAT32)
    assert_same_bits(
        ops.matmul(x[::2, ::-1], weight[:, ::-1]), ops.matmul(x[::2, ::-1].copy(), weight[:, ::-1].copy())
    )
    narrow = x.astype(BFLOAT16)
    assert_same_bits(ops.rms_norm(narrow[::2], narrow[0]), ops.rms_norm(narrow[::2].copy(), narrow[0]))


def test_each_thread_has_a_gpu_backend_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream and scratch memory are one caller's at a time. A CPU backend may be shared."""
    monkeypatch.setattr(ops, "find_cuda_libraries", lambda device: None)
    monkeypatch.setattr(ops._core, "Ops", lambda **options: object())
    ops._made_ops.cache_clear()
    try:
        with ThreadPoolExecutor(1) as other:
            for device, shared in (("cuda", False), ("cpu", True)):
                here, there = ops._ops(device, "auto", 0), other.submit(ops._ops, device, "auto", 0).result()
                assert (here is there) == shared
                assert ops._ops(device, "auto", 0) is here
                assert other.submit(ops._ops, device, "auto", 0).result() is there
    finally:
        ops._made_ops.cache_clear()


def test_read_bandwidth_is_measured() -> None:
    assert ops.measure_read_bandwidth(num_threads=1, bytes=1 << 22) > 0.01
