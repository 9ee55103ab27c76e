"""The choice of a token, on the CPU and on the GPU, against a float64 reference written from the definitions.

The CPU must draw the very token of the reference. The GPU computes the race in float32: it may draw another
one only if the scores of both differ by less than 1e-5 of themselves.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import DEVICE
from tiny_vllm import ops
from tiny_vllm.errors import InvalidRequestError

Array = Any
every_device = pytest.mark.parametrize("device", [DEVICE])


# ---- the reference -----------------------------------------------------------------------------------------


def philox(counter: list[Array], key: Array) -> list[Array]:
    """Philox 4x32-10 (Salmon et al., SC 2011) on arrays of uint64 that hold 32-bit words; keys of 64 bits."""
    low, by = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = key & low, key >> by
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> by) ^ c1 ^ k0, b & low, (a >> by) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return [c0, c1, c2, c3]


def noise(vocab_size: int, seeds: Array, positions: Array) -> Array:
    """(n, V): -log(e) for e ~ Exp(1), from word i % 4 of Philox block i // 4."""
    seeds, positions = np.asarray(seeds, np.uint64)[:, None], np.asarray(positions, np.uint64)[:, None]
    blocks = np.arange(-(-vocab_size // 4), dtype=np.uint64)[None]
    counter = [blocks, positions & np.uint64(0xFFFFFFFF), positions >> np.uint64(32), np.uint64(0)]
    words = np.stack(philox(counter, seeds), axis=-1).reshape(len(seeds), -1)[:, :vocab_size]
    return -np.log(-np.log((words.astype(np.float64) + 0.5) / 2**32))


def kept(
    logits: Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Array:
    """(V): which tokens of a row may be drawn."""
    x = np.asarray(logits, np.float64)
    weights = np.exp((x - x.max()) / temperature)
    keep = (weights > 0) & (weights >= min_p)
    order = np.argsort(-x, kind="stable")  # of equals the lower id comes first
    order = order[keep[order]]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        sums = np.cumsum(weights[order])
        order = order[: 1 + np.searchsorted(sums, top_p * math.fsum(weights[order]))]
    result = np.zeros(len(x), bool)
    result[order] = True
    return result


def assert_draws(
    tokens: Array, logits: Array, device: str, *, seeds: Array, positions: Array, **fields: Any
) -> None:
    """Each token is the winner of the race among those that the filters keep."""
    fields = {"temperature": 1.0, **fields}
    assert tokens.dtype == np.int32
    assert tokens.shape == (len(logits),)
    gumbels = noise(logits.shape[1], seeds, positions)
    for row, (token, x, gumbel) in enumerate(zip(tokens, logits, gumbels, strict=True)):
        keep = kept(x, **fields)
        x = x.astype(np.float64)
        score = np.where(keep, (x - x.max()) / fields["temperature"] + gumbel, -np.inf)
        best = int(np.argmax(score))
        if token == best:
            continue
        # A difference of logarithms: the relative difference of the scores themselves.
        close = device == "cuda" and keep[token] and score[best] - score[token] < 1e-5
        assert close, f"row {row}: {token} with {score[token]}, expected {best} with {score[best]}"


def random_logits(kind: str, rows: int, vocab_size: int) -> Array:
    x = np.random.default_rng([rows, vocab_size]).standard_normal((rows, vocab_size)) * 3
    if kind == "ties":
        x = np.round(x * 2) / 2
    elif kind == "flat":
        x *= 1e-3
    elif kind == "peaked":
        x *= 10
    elif kind == "equal":
        x[:] = -7.25
    elif kind == "masked":
        x[:, np.random.default_rng(1).random(vocab_size) < 0.7] = -np.inf
        x[:, vocab_size // 2] = 1.0
    return x.astype(np.float32)


# ---- greedy, and rows without an answer --------------------------------------------------------------------

GREEDY: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 1},
    {"temperature": 0.0, "top_p": 0.5, "min_p": 0.3},
]
DRAWN: list[dict[str, Any]] = [
    {},
    {"min_p": 0.1},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.01, "top_k": 5, "top_p": 0.9, "temperature": 0.7},
]


def label(fields: dict[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in fields.items()) or "plain"


@every_device
@pytest.mark.parametrize("fields", GREEDY, ids=label)
@pytest.mark.parametrize("vocab_size", [1, 2, 5, 1000, 32003, 128256])
def test_greedy_takes_the_lowest_id_among_equals(
    device: str, fields: dict[str, Any], vocab_size: int
) -> None:
    logits = random_logits("ties", 7, vocab_size)
    logits[1] = -3.5
    logits[2] = -np.inf
    logits[2, vocab_size // 2] = -1e38
    logits[3] = -0.0
    logits[3, vocab_size // 2 :] = 0.0  # equal to -0
    logits[4, -1] = 99
    logits[5] = np.float32(1e-45) * (np.arange(vocab_size) % 3)  # the smallest floats there are
    tokens = ops.sample(logits, seeds=5, device=device, **fields)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    assert tokens[1] == tokens[3] == 0


@every_device
@pytest.mark.parametrize("fields", [*GREEDY, *DRAWN], ids=label)
@pytest.mark.parametrize("vocab_size", [1, 6, 4096, 50257])
def test_rows_without_an_answer(device: str, fields: dict[str, Any], vocab_size: int) -> None:
    """NaN and +infinity anywhere, or nothing but -infinity; the rows around them are not disturbed."""
    logits = random_logits("normal", 17, vocab_size)
    sound = logits.copy()
    places = [0, vocab_size // 3, vocab_size - 1]
    for i, value in enumerate([np.nan, np.inf, -np.nan]):
        for j, place in enumerate(places):
            logits[2 * (3 * i + j) % 17, place] = value
    logits[15] = -np.inf
    bad = ~(np.isfinite(logits).all(axis=1))
    assert 0 < bad.sum() < 17
    tokens = ops.sample(logits, seeds=3, device=device, **fields)
    assert (tokens[bad] == -1).all()
    np.testing.assert_array_equal(tokens[~bad], ops.sample(sound, seeds=3, device=device, **fields)[~bad])
    assert (tokens[~bad] >= 0).all()


# ---- the race among what the filters keep ------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    *DRAWN,
    {"temperature": 0.3},
    {"temperature": 50.0},
    {"temperature": 1e-6},
    {"min_p": 1.0},
    {"min_p": 1e-30},
    {"top_k": 50},
    {"top_k": 1000},
    {"top_k": 5000},
    {"top_k": 10**12},
    {"top_p": 1e-9},
    {"top_p": 0.95, "temperature": 3.0},
    {"top_p": 0.999},
    {"top_k": 2000, "top_p": 0.97},
    {"min_p": 0.2, "top_p": 0.5},
    {"min_p": 0.05, "top_k": 700},
]


@every_device
@pytest.mark.parametrize("fields", SETTINGS, ids=label)
@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "peaked", "equal", "masked"])
def test_every_draw_is_the_documented_race(device: str, kind: str, fields: dict[str, Any]) -> None:
    for vocab_size in (1, 2, 3, 4, 5, 31, 64, 1023, 1025, 4099):
        logits = random_logits(kind, 5, vocab_size)
        seeds = np.array([0, 1, 2**32 + 5, 2**63, 2**64 - 1], np.uint64)
        positions = np.array([0, 1, 77, 2**32 + 1, 2**62])
        tokens = ops.sample(logits, seeds=seeds, positions=positions, device=device, **fields)
        assert_draws(tokens, logits, device, seeds=seeds, positions=positions, **fields)


@every_device
@pytest.mark.parametrize("fields", SETTINGS, ids=label)
def test_large_vocabularies(device: str, fields: dict[str, Any]) -> None:
    for kind, vocab_size in (("normal", 128256), ("ties", 50257), ("flat", 128256), ("equal", 32003)):
        logits = random_logits(kind, 2, vocab_size)
        seeds, positions = np.array([11, 12]), np.array([5, 5])
        tokens = ops.sample(logits, seeds=seeds, positions=positions, device=device, **fields)
        assert_draws(tokens, logits, device, seeds=seeds, positions=positions, **fields)


@every_device
def test_filters_keep_the_lowest_ids_among_equals(device: str) -> None:
    """2,000 equal logits, and 2,000 draws: enough for the last kept one to be among the drawn, nearly."""
    logits = np.full((2000, 2000), 1.5, np.float32)
    seeds = np.arange(2000)
    for fields, count in (({"top_p": 0.5}, 1000), ({"top_k": 77}, 77), ({"top_k": 100, "top_p": 0.3}, 30)):
        tokens = ops.sample(logits, seeds=seeds, device=device, **fields)
        assert 0.99 * count - 1 <= tokens.max() < count, fields
        assert tokens.min() < 0.01 * count + 1
    # One is far ahead, and the border runs through equals at the end.
    logits[:, 1999] = 3.0
    assert set(ops.sample(logits, seeds=seeds, top_k=3, device=device)) == {1999, 0, 1}


@every_device
def test_top_p_keeps_the_token_that_crosses_the_border(device: str) -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/16, 1/16: for each border the least set whose sum reaches it."""
    row = np.log([0.5, 0.25, 0.125, 0.0625, 0.0625]).astype(np.float32)
    logits, seeds = np.tile(row, (1000, 1)), np.arange(1000)
    borders = {0.4: 1, 0.51: 2, 0.74: 2, 0.76: 3, 0.874: 3, 0.876: 4, 0.93: 4, 0.94: 5, 0.99999: 5, 1.0: 5}
    for top_p, count in borders.items():
        assert set(ops.sample(logits, top_p=top_p, seeds=seeds, device=device)) == set(range(count)), top_p


@every_device
def test_min_p_is_a_part_of_the_largest_probability(device: str) -> None:
    row = np.log([0.1, 0.4, 0.2, 0.05, 0.25]).astype(np.float32)
    logits, seeds = np.tile(row, (1000, 1)), np.arange(1000)
    for min_p, tokens in (
        (0.1, {0, 1, 2, 3, 4}),
        (0.13, {0, 1, 2, 4}),
        (0.26, {1, 2, 4}),
        (0.6, {1, 4}),
        (1.0, {1}),
    ):
        assert set(ops.sample(logits, min_p=min_p, seeds=seeds, device=device)) == tokens, min_p


# ---- many rows ---------------------------------------------------------------------------------------------


@every_device
def test_more_rows_than_a_grid_is_high(device: str) -> None:
    rows = 70_000
    logits = random_logits("normal", rows, 8)
    seeds, positions = np.arange(rows), np.arange(rows) * 3
    score = logits.astype(np.float64) + noise(8, seeds, positions)
    tokens = ops.sample(logits, seeds=seeds, positions=positions, device=device)
    best = score.max(axis=1)
    assert (best - score[np.arange(rows), tokens] < (1e-5 if device == "cuda" else 1e-12)).all()
    assert (tokens == score.argmax(axis=1)).mean() > 0.999
    greedy = ops.sample(logits, temperature=0.0, device=device)
    np.testing.assert_array_equal(greedy, logits.argmax(axis=1))
    best_two = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    assert (ops.sample(logits, seeds=seeds, top_k=2, device=device)[:, None] == best_two).any(axis=1).all()


@every_device
def test_a_draw_does_not_depend_on_its_batch(device: str) -> None:
    """Rows of all sorts together, one by one, in another order, and again."""
    rows, vocab_size = 200, 3001
    logits = random_logits("ties", rows, vocab_size)
    some = [*GREEDY, *SETTINGS]
    columns: dict[str, Array] = {
        name: np.array([some[i % len(some)].get(name, default) for i in range(rows)])
        for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    columns["seeds"], columns["positions"] = np.arange(rows) * 7, np.arange(rows)
    together = ops.sample(logits, device=device, **columns)
    np.testing.assert_array_equal(together, ops.sample(logits, device=device, **columns))
    backwards = ops.sample(logits[::-1].copy(), device=device, **{k: v[::-1] for k, v in columns.items()})
    np.testing.assert_array_equal(together[::-1], backwards)
    for i in range(rows):
        alone = ops.sample(logits[i : i + 1], device=device, **{k: v[i : i + 1] for k, v in columns.items()})
        assert alone[0] == together[i], i


def chi_square_bound(degrees: int) -> float:
    """99.99th percentile, by Wilson and Hilferty's approximation (PNAS 17, 1931) and a little more."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3 + 1


@every_device
@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.5}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1, "top_p": 0.9}],
    ids=label,
)
@pytest.mark.parametrize("vary", ["seeds", "positions"])
def test_frequencies(device: str, vary: str, fields: dict[str, Any]) -> None:
    """20,000 draws, always the same: a right sampler passes for all but one choice of seeds in 10,000."""
    draws = 20_000
    row = random_logits("normal", 1, 16)[0] / 2
    varied = {**fields, vary: np.arange(draws)}
    tokens = ops.sample(np.tile(row, (draws, 1)), device=device, **varied)
    x = row.astype(np.float64) / fields.get("temperature", 1.0)
    p = np.where(kept(row, **fields), np.exp(x - x.max()), 0)
    p /= p.sum()
    count = np.bincount(tokens, minlength=16)
    assert (count[p == 0] == 0).all()
    likely = draws * p >= 5
    assert likely.sum() >= 4
    chi_square = ((count - draws * p)[likely] ** 2 / (draws * p)[likely]).sum()
    assert chi_square <= chi_square_bound(int(likely.sum()) - 1)


# ---- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 2.0),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: float) -> None:
    logits = np.zeros((2, 4), np.float32)
    for given in (value, [1, value]):
        with pytest.raises(InvalidRequestError, match=field):
            ops.sample(logits, **{field: given})  # type: ignore[arg-type]


WRONG: list[tuple[str, Any]] = [
    *(
        (field, value)
        for field in ("temperature", "top_p", "min_p")
        for value in ("a", None, 10**400, 1 + 2j, True, math.inf, math.nan, {}, b"1", [[1, 1]])
    ),
    *(
        (field, value)
        for field in ("top_k", "seeds", "positions")
        for value in (1.5, 2.0, "x", None, True, {}, 2**64, 10**5000, math.nan, np.datetime64(1, "s"), 1j)
    ),
    ("seeds", -1),
    ("top_k", 2**63),
    ("positions", -1),
    ("positions", 2**63),
]


@pytest.mark.parametrize(
    ("field", "value"), WRONG, ids=lambda value: f"{value!s:.20}" if value != 10**5000 else "long"
)
def test_what_is_no_such_number_is_refused_by_name(field: str, value: Any) -> None:
    logits = np.zeros((2, 4), np.float32)
    for given, name in (
        (value, rf"^{field}\b"),
        ([1, value], rf"^{field}\[1\] is "),
        ((value, 1), rf"^{field}\[0\] is "),
    ):
        with pytest.raises(InvalidRequestError, match=name):
            ops.sample(logits, **{field: given})


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "min_p", "seeds", "positions"])
def test_columns_that_do_not_fit_the_rows_are_refused_by_name(field: str) -> None:
    logits = np.zeros((2, 4), np.float32)
    for wrong in (
        [1, 1, 1],
        [],
        [[1], [1, 1]],
        [[1, 1], [1, 1]],
        np.ones((2, 2), int),
        np.array([True, True]),
        np.array([1, "x"], object),
        np.zeros(2, "M8[ns]"),
    ):
        with pytest.raises(InvalidRequestError, match=rf"^{field}\b"):
            ops.sample(logits, **{field: wrong})  # type: ignore[arg-type]


def test_numbers_of_every_kind_are_taken() -> None:
    logits = random_logits("normal", 2, 50)
    one_by_one = [ops.sample(logits, seeds=seed)[row] for row, seed in enumerate((2**64 - 1, 1))]
    for seeds in ([2**64 - 1, 1], (2**64 - 1, np.int8(1)), np.array([2**64 - 1, 1], np.uint64)):
        assert_draws(ops.sample(logits, seeds=seeds), logits, "cpu", seeds=[2**64 - 1, 1], positions=[0, 0])
        np.testing.assert_array_equal(ops.sample(logits, seeds=seeds), one_by_one)
    expected = ops.sample(logits, temperature=0.5, top_k=3, seeds=1, positions=2**63 - 1)
    for half, three in ((np.float32(0.5), np.int8(3)), ([0.5, np.float16(0.5)], np.array([3, 3], object))):
        tokens = ops.sample(logits, temperature=half, top_k=three, seeds=1, positions=[2**63 - 1] * 2)
        np.testing.assert_array_equal(tokens, expected)


def test_bad_shapes_are_refused() -> None:
    logits = np.zeros((2, 4), np.float32)
    with pytest.raises(
        InvalidRequestError, match="seeds has 3 values, expected one, or one for each of 2 rows"
    ):
        ops.sample(logits, seeds=[1, 2, 3])
    for wrong in (logits[0], logits.astype(np.float64), logits[:, :0], None, [[0.0, 1.0]]):
        with pytest.raises(InvalidRequestError, match="logits"):
            ops.sample(wrong)  # type: ignore[arg-type]


@every_device
def test_no_rows(device: str) -> None:
    assert ops.sample(np.zeros((0, 4), np.float32), device=device).shape == (0,)
