"""Softmax → online softmax

Where e^x ends, five kernels of which one is right, and states of a row that merge in any order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

from tiny_vllm import _core
from tiny_vllm.course.lab import BLUE, GREY, ORANGE, Data, kernels, measured, say, section, table
from tiny_vllm.course.layers import SmallModel

TEXT = """The cat sat on the mat because it was tired. The dog was not tired. It wanted to play, so it went
to the mat and looked at the cat until the cat got up and left the room."""
VERSIONS = ("naive", "three passes", "online", "online, guarded", "one block a row")
READS = (2, 3, 2, 2, 2)
STREAM = (11, 1)  # layer and head whose scores rise many times
LOW = (11, 0)  # layer and head with a row of low scores
Array = Any


def run(device: str) -> Data:
    model = SmallModel(device)
    ids = model.tokenizer.encode(" ".join(TEXT.split()))
    _show_limits()
    layers = list(_layers(model, ids))
    scores = [_scores(model, rotated) for rotated in layers]
    layer, head = _show_largest(ids, scores)
    _show_kernels(scores[layer][head], device)
    row = scores[STREAM[0]][STREAM[1]][-1]
    trace = _show_stream(model.pieces(ids), row)
    _show_merging(row)
    _show_stand_in(scores[LOW[0]][LOW[1]])
    _show_engine(model, layers[layer])
    return trace


def _show_limits() -> None:
    section("Where e^x ends")
    finfo: Any = ml_dtypes.finfo
    rows = []
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        largest = float(finfo(dtype).max)
        rows.append((np.dtype(dtype).name, f"{largest:.4g}", f"{np.log(largest):.2f}"))
    table(("type", "largest number", "its logarithm"), rows)
    with np.errstate(over="ignore"):
        values = ", ".join(f"e^{x} = {np.exp(np.float32(x)):.4g}" for x in (88, 88.7, 88.8))
    say(f"In float32, {values}.")


def _layers(model: SmallModel, ids: list[int]) -> Iterator[Array]:
    """Rotated queries, keys and values of each layer."""
    x = model.residual(ids, 0)
    for layer in range(model.config["num_layers"]):
        yield model.rotated(model.qkv_of(x, layer))
        x = model.after_layer(x, layer)


def _scores(model: SmallModel, rotated: Array) -> Array:
    """(H, T, T), with hidden keys as -inf."""
    q, k, _ = model.split(rotated)
    group = model.heads // model.kv_heads
    scores = np.stack([q[:, h] @ k[:, h // group].T for h in range(model.heads)]) / np.float32(8)
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    return scores


def _show_largest(ids: list[int], scores: list[Array]) -> tuple[int, int]:
    section("The largest scores of the small model")
    largest = np.array([s.max() for s in scores])
    table(
        ("", "largest score", "layers above 11.09", "layers above 88.72"),
        [
            (
                name,
                f"{factor * largest.max():.1f}",
                np.count_nonzero(factor * largest > 11.09),
                np.count_nonzero(factor * largest > 88.72),
            )
            for name, factor in (("q·k / 8", 1), ("q·k", 8))
        ],
    )
    layer = int(largest.argmax())
    head = int(scores[layer].max(axis=(1, 2)).argmax())
    say(f"{len(ids)} tokens, {len(scores)} layers. The largest is in layer {layer}, head {head}.")
    return layer, head


def softmax(scores: Array) -> Array:
    """Along the last axis, in float64; a row that is all -inf gives zeros."""
    wide = scores.astype(np.float64)
    largest = wide.max(axis=-1, keepdims=True)
    e = np.exp(wide - np.where(np.isneginf(largest), 0, largest))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def _inputs(scores: Array) -> dict[str, Array]:
    """Four kinds of rows, each (rows, n), float32."""
    late = scores.copy()
    rows, n = late.shape
    late[np.arange(n) < np.arange(rows)[:, None] - 7] = -np.inf  # a token sees the last 8
    return {
        "as they are": scores,
        "not divided": scores * 8,
        "first hidden": late,
        "all hidden": np.full_like(scores, -np.inf),
    }


def _show_kernels(scores: Array, device: str) -> None:
    section("Five kernels")
    on_gpu = device == "cuda"
    library = kernels("softmax.cu", device)
    lines = []
    for version, name in enumerate(VERSIONS, 1):
        line: tuple[Any, ...] = (version, name, READS[version - 1])
        for x in _inputs(scores).values():
            out = np.full_like(x, -1)
            library(
                "softmax", version, np.ascontiguousarray(x), out, *x.shape, ctypes.byref(ctypes.c_float())
            )
            line += (_verdict(out, softmax(x)),)
        if on_gpu:
            wide = np.ascontiguousarray(np.tile(scores[-1:], (8192, 2048 // scores.shape[1] + 1))[:, :2048])
            ms = ctypes.c_float()
            library("softmax", version, wide, np.empty_like(wide), *wide.shape, ctypes.byref(ms))
            line += (measured(ms.value * 1e3, "µs"), measured(2 * wide.nbytes / ms.value / 1e6, "GB/s"))
        lines.append(line)
    header: tuple[str, ...] = ("", "kernel", "reads", *_inputs(scores))
    table(header + (("time", "memory") if on_gpu else ()), lines)
    say(
        f"{scores.shape[0]} rows of {scores.shape[1]} scores, on "
        + (_core.cuda_devices()[0][0].name if on_gpu else "a CPU that plays a GPU (course/kernels/simt.h)")
        + ". A number says how many rows are wrong."
    )
    if on_gpu:
        say("Times are of 8,192 rows of 2,048 scores; GB/s count one reading and one writing.")


def _verdict(out: Array, expected: Array) -> str:
    wrong = ~(np.abs(out - expected).max(axis=1) < 1e-5)  # NaN is wrong, too
    if not wrong.any():
        return "right"
    return f"{np.count_nonzero(wrong)}" + (" NaN" if np.isnan(out[wrong]).any() else "")


def _show_stream(pieces: list[str], row: Array) -> Data:
    section("One score at a time")
    largest, total = -np.inf, 0.0
    maxima, sums, lines = [], [], []
    for i, score in enumerate(row.astype(np.float64)):
        new = max(largest, score)
        factor = np.exp(largest - new)
        total = total * factor + np.exp(score - new)
        if i < 8:
            lines.append((repr(pieces[i]), f"{score:.2f}", f"{new:.2f}", f"{factor:.3f}", f"{total:.3f}"))
        largest = new
        maxima.append(round(float(largest), 3))
        sums.append(round(float(total), 4))
    table(("key", "score", "largest", "old sum times", "sum"), lines)
    say(
        f"The first 8 of {row.size} scores of the last token, layer {STREAM[0]}, head {STREAM[1]}. In the "
        f"whole row the largest rises {len(set(maxima))} times. "
        f"In the end it is {maxima[-1]:.2f}, the sum {sums[-1]:.3f}."
    )
    return {"scores": [round(float(s), 3) for s in row], "maxima": maxima, "sums": sums}


def _state(scores: Array) -> tuple[np.float32, np.float32]:
    largest = scores.max(initial=np.float32(-np.inf))
    return largest, np.exp(scores - (0 if np.isneginf(largest) else largest)).sum(dtype=np.float32)


def _merge(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    largest = max(a[0], b[0])
    shift = np.float32(0) if np.isneginf(largest) else largest
    return largest, a[1] * np.exp(a[0] - shift) + b[1] * np.exp(b[0] - shift)


def _show_merging(row: Array) -> None:
    section("Cut anywhere")
    n = row.size
    ways = {
        "one part": [row],
        "two halves": [row[: n // 2], row[n // 2 :]],
        "7 and the rest": [row[:7], row[7:]],
        "one by one": list(row[:, None]),
        "one by one, backwards": list(row[::-1, None]),
        "with an empty part": [row[:7], row[:0], row[7:]],
    }
    exact = np.exp(row.astype(np.float64) - row.max()).sum()
    lines = []
    for name, parts in ways.items():
        largest, total = reduce(_merge, (_state(part) for part in parts))
        error = abs(float(total) - exact) / exact
        lines.append(
            (
                name,
                len(parts),
                f"{largest:.4f}",
                f"{total:.4f}",
                "yes" if error < 1e-6 else f"no: {error:.1e}",
            )
        )
    table(("cut into", "parts", "largest", "sum", "within 1e-6"), lines)


def _show_stand_in(scores: Array) -> None:
    section("A stand-in for minus infinity")
    hidden = np.isneginf(scores)
    lines = []
    for factor in (1, 100, 1000):
        finite = np.where(hidden, 0, scores) * factor
        line: tuple[Any, ...] = (factor, f"{finite[0, 0]:,.0f}")
        for stand_in in (-np.inf, -1e4):
            weights = softmax(np.where(hidden, stand_in, finite).astype(np.float32))
            line += (f"{np.where(hidden, weights, 0).sum(axis=1).max():.2f}",)
        lines.append(line)
    table(("scores times", "score of row 0", "hidden, with -inf", "hidden, with -10000"), lines)
    say(
        f"The largest weight that a row gives to its hidden keys together, layer {LOW[0]}, head {LOW[1]}. "
        "Row 0 sees only itself."
    )


def _show_engine(model: SmallModel, rotated: Array) -> None:
    section("The engine")
    q, k, v = (x.astype(np.float64) for x in model.split(rotated))
    hidden = np.triu(np.ones((q.shape[0], q.shape[0]), bool), 1)
    group = model.heads // model.kv_heads
    lines = []
    for scale in (0.125, 1.0, 100.0):
        out = model.attention(rotated, scale=scale)
        expected = []
        largest = 0.0
        for h in range(model.heads):
            scores = np.where(hidden, -np.inf, q[:, h] @ k[:, h // group].T * scale)
            largest = max(largest, scores.max())
            expected.append(softmax(scores) @ v[:, h // group])
        error = np.abs(out - np.concatenate(expected, axis=1)).max()
        lines.append(
            (
                scale,
                f"{largest:,.0f}",
                np.count_nonzero(np.isnan(out)),
                "yes" if error < 1e-2 else f"no: {error}",
            )
        )
    table(("scale", "largest score", "NaN", "as in float64"), lines)


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    places = range(len(data["scores"]))
    left.plot(places, data["scores"], "o", color=GREY, markersize=4, label="score")
    left.step(places, data["maxima"], where="mid", color=ORANGE, label="largest so far")
    left.set(title=f"Layer {STREAM[0]}, head {STREAM[1]}, last token", xlabel="key", ylabel="score")
    left.legend(loc="lower right")
    right.step(places, data["sums"], where="post", color=BLUE)
    right.set(title="Sum of e^(score − largest so far)", xlabel="key", ylabel="sum")
    right.set_ylim(0)
