"""The paged attention kernel

Four kernels that attend through block tables, two that read what they must not, and what splits cost.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tiny_vllm import _core, ops
from tiny_vllm.course.lab import (
    BLUE,
    GREY,
    ORANGE,
    Data,
    Kernels,
    kernels,
    measured,
    say,
    section,
    table,
)
from tiny_vllm.course.layers import DH, HK, H, SmallModel, plain_attention

VERSIONS = ("contiguous", "paged", "grouped", "split")
TRUSTING, MASKED = 5, 6
BLOCK_SIZE = 16
WARPS = 4  # of a block of threads, in course/kernels/paged_attention.cu
TEXTS = (
    "The cat sat on the mat and looked at the bird outside of the window.",
    "Memory is cut into blocks of one size. A request gets blocks from anywhere, and a table says which of "
    "them is its first, its second, its third.",
    "Two and two make",
)


class Cache:
    """Three requests in one paged cache: tables out of order, of different lengths, and unused places."""

    def __init__(self, query: Any, keys: list[Any], values: list[Any], seed: int = 0) -> None:
        """query (R, H, Dh); of each request keys and values (context, Hk, Dh)."""
        self.query, self.keys_of, self.values_of = query, keys, values
        self.context = np.array([len(k) for k in keys], np.int32)
        self.width = -(-int(self.context.max()) // BLOCK_SIZE)
        needed = -(-self.context // BLOCK_SIZE)
        order = np.random.default_rng(seed).permutation(int(needed.sum()) + 2)
        self.tables = np.zeros((len(keys), self.width), np.int32)  # filled up with 0
        for r, end in enumerate(np.cumsum(needed)):
            self.tables[r, : needed[r]] = order[end - needed[r] : end]
        self.num_blocks = order.size

    def paged(self, unused: tuple[Any, Any] = (np.nan, np.nan)) -> tuple[Any, Any]:
        """keys and values (NB, Hk, BS, Dh); `unused`: what is in places that nobody has written."""
        kv_heads, dim = self.keys_of[0].shape[1:]
        result = []
        for rows_of, rest in zip((self.keys_of, self.values_of), unused, strict=True):
            cache = np.empty((self.num_blocks, kv_heads, BLOCK_SIZE, dim), np.float32)
            cache[:] = rest
            for r, rows in enumerate(rows_of):
                for i in range(-(-len(rows) // BLOCK_SIZE)):
                    part = rows[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
                    cache[self.tables[r, i], :, : len(part)] = part.transpose(1, 0, 2)
            result.append(cache)
        return result[0], result[1]

    def contiguous(self) -> tuple[Any, Any]:
        """(R, Hk, S, Dh), twice."""
        kv_heads, dim = self.keys_of[0].shape[1:]
        result = []
        for rows_of in (self.keys_of, self.values_of):
            shape = (len(rows_of), kv_heads, self.width * BLOCK_SIZE, dim)
            cache = np.full(shape, np.nan, np.float32)
            for r, rows in enumerate(rows_of):
                cache[r, :, : len(rows)] = rows.transpose(1, 0, 2)
            result.append(cache)
        return result[0], result[1]

    def attend(
        self, library: Kernels, version: int, cache: tuple[Any, Any], splits: int = 1
    ) -> tuple[Any, float]:
        """out (R, H, Dh), and the milliseconds of it."""
        out = np.full_like(self.query, np.nan)
        ms = ctypes.c_float()
        requests, heads, dim = self.query.shape
        kv_heads = cache[0].shape[1]
        library(
            "paged_attention", version, self.query, *cache, self.tables, self.context, out, requests, heads,
            kv_heads, BLOCK_SIZE, self.width, cache[0].size // dim, splits, float(1 / np.sqrt(dim)),
            ctypes.byref(ms),
        )  # fmt: skip
        return out, ms.value

    def reference(self) -> Any:
        rows = zip(self.query, self.keys_of, self.values_of, strict=True)
        return np.stack([plain_attention(*row) for row in rows])


def run(device: str) -> Data:
    on_gpu = device == "cuda"
    library = kernels("paged_attention.cu", device)
    cache = _of_texts()
    expected = cache.reference()

    section("Three requests in one cache")
    for r, context in enumerate(cache.context):
        used = -(-context // BLOCK_SIZE)
        print(f"request {r}: {context:2} keys, blocks {' '.join(map(str, cache.tables[r, :used]))}")
    say(f"The table has {cache.width} columns; what is left of a row is filled up with 0.")

    section("Four kernels")
    big = _at_random([2048] * 32, 32, 8) if on_gpu else cache
    right_answer = big.reference()
    lines: list[tuple[Any, ...]] = []
    paged, straight = big.paged(), big.contiguous()
    for version, name in enumerate(VERSIONS, 1):
        out, ms = big.attend(library, version, straight if version == 1 else paged, splits=4)
        error = np.abs(out - right_answer).max()
        blocks, chain, read = _costs(big, version, 4)
        line: tuple[Any, ...] = (version, name, blocks, chain, f"{read / 1e3:,.0f} KB",
                                 "yes" if error < 1e-5 else f"no: {error:.3g}")  # fmt: skip
        lines.append((*line, measured(1e3 * ms, "µs"), measured(read / ms / 1e6, "GB/s")) if on_gpu else line)
    header: tuple[str, ...] = (
        "",
        "kernel",
        "blocks of threads",
        "keys in a row",
        "keys and values read",
        "right",
    )
    table((*header, "time", "memory") if on_gpu else header, lines)
    if on_gpu:
        say(f"32 requests of 2,048 keys, H = 32, Hk = 8, on {_core.cuda_devices()[0][0].name}.")
    else:
        say("H = 9, Hk = 3, float32; version 4 with 4 splits. Unused places hold NaN.")
    ours = ops.paged_attention(
        _as_rows(cache), *cache.paged(), block_tables=cache.tables, context_len=cache.context,
        query_start=range(len(TEXTS) + 1), num_heads=H, device=device,
    )  # fmt: skip
    error = np.abs(ours.reshape(expected.shape) - expected).max()
    say(f"The engine's own kernel is off by {'less than 0.00001' if error < 1e-5 else error}.")

    section("What lies behind the end")
    rows = []
    stale = tuple(of[1][:1].transpose(1, 0, 2) for of in (cache.keys_of, cache.values_of))
    for name, version in (("paged", 2), ("trusting", TRUSTING), ("masked", MASKED)):
        errors = []
        for unused in ((0, 0), stale, (np.nan, np.nan)):
            out, _ = cache.attend(library, version, cache.paged(unused))
            worst = np.abs(out - expected).max(axis=(1, 2)) / np.abs(expected).max(axis=(1, 2))
            errors.append(" ".join("NaN" if np.isnan(w) else f"{w:.0%}" for w in worst))
        rows.append((name, *errors))
    table(("kernel", "zeros", "a former owner's", "NaN"), rows)
    say("Of each of the three requests: how far the result is off, by what the unused places hold.")

    section("Splits")
    contexts = [16384] if on_gpu else [128]
    long = _at_random(contexts, *((32, 8) if on_gpu else (H, HK)))
    whole = long.paged()
    first, _ = long.attend(library, 3, whole)
    lines = []
    for splits in (1, 2, 4, 8, 16, 32, 64, 128) if on_gpu else (1, 4, 16, 64):
        out, ms = long.attend(library, 4, whole, splits)
        blocks, chain, read = _costs(long, 4, splits)
        partials = 2 * splits * long.query.shape[1] * (DH + 2) * 4
        right = np.abs(out - first).max() < 1e-5
        cache_read, through = f"{read / 1e3:,.0f} KB", f"{partials / 1e3:,.1f} KB"
        row = (splits, blocks, chain, splits, cache_read, through, "yes" if right else "no")
        lines.append((*row, measured(1e3 * ms, "µs"), measured(read / ms / 1e6, "GB/s")) if on_gpu else row)
    header = ("splits", "blocks of threads", "keys in a row", "merges", "cache", "partials", "right")
    table((*header, "time", "memory") if on_gpu else header, lines)
    say(f"One request of {contexts[0]:,} keys. Partials are written once and read once.")

    return {"splits": _of_one_request(4096)}


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _of_texts() -> Cache:
    """Real queries, keys and values of three texts, in the first layer."""
    model = SmallModel()
    query, keys, values = [], [], []
    for text in TEXTS:
        qkv = model.qkv(model.tokenizer.encode(text), layer=0)
        q, k, v = model.split(model.rotated(qkv))
        query.append(q[-1])
        keys.append(k)
        values.append(v)
    return Cache(np.stack(query), keys, values)


def _at_random(contexts: list[int], heads: int, kv_heads: int) -> Cache:
    rng = np.random.default_rng(18)

    def rows(n: int) -> list[Any]:
        return [rng.standard_normal((c, n, DH), np.float32) for c in contexts]

    query = rng.standard_normal((len(contexts), heads, DH), np.float32)
    return Cache(query, rows(kv_heads), rows(kv_heads))


def _as_rows(cache: Cache) -> Any:
    """Queries as the engine has them: qkv (R, (H+2Hk)·Dh), of which only the queries are read."""
    rows = np.full((len(cache.query), (H + 2 * HK) * DH), np.nan, np.float32)
    rows[:, : H * DH] = cache.query.reshape(len(cache.query), -1)
    return rows


def _costs(cache: Cache, version: int, splits: int) -> tuple[int, int, int]:
    """Blocks of threads; keys that a warp sees one after the other, at most; bytes of keys and values."""
    requests, heads, dim = cache.query.shape
    kv_heads = cache.keys_of[0].shape[1]
    by = heads if version <= 2 else kv_heads
    parts = splits if version == 4 else 1
    longest = _up(int(cache.context.max()), parts)
    return requests * by * parts, _up(longest, WARPS), 2 * 4 * dim * by * int(cache.context.sum())


def _of_one_request(context: int) -> list[tuple[int, int, float]]:
    """At Llama-3.2-1B's shape: splits, keys that a warp sees in a row, partials as a share of the cache."""
    heads, kv_heads = 32, 8
    return [
        (
            splits,
            _up(_up(context, splits), WARPS),
            2 * splits * heads * (DH + 2) * 4 / (2 * context * kv_heads * DH * 4),
        )
        for splits in (1, 2, 4, 8, 16, 32, 64, 128)
    ]


def draw(data: Data, figure: Any) -> None:
    splits, chain, share = zip(*data["splits"], strict=True)
    left, right = figure.subplots(1, 2)
    left.plot(splits, [s + c for s, c in zip(splits, chain, strict=True)], color=BLUE, marker="o",
              label="keys and merges")  # fmt: skip
    left.plot(splits, chain, color=GREY, linestyle="--", label="keys")
    left.set(title="What a result waits for", xlabel="splits", ylabel="one after the other", xscale="log",
             yscale="log", xticks=splits, xticklabels=splits)  # fmt: skip
    left.legend()
    right.plot(splits, [100 * s for s in share], color=ORANGE, marker="o")
    right.set(title="Bytes of partials", xlabel="splits", ylabel="% of the keys and values", xscale="log",
              xticks=splits, xticklabels=splits)  # fmt: skip
    for axes in (left, right):
        axes.minorticks_off()
