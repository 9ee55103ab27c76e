"""RMSNorm and parallel reduction

Five kernels that compute the same, on real rows, and what each of them costs.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tiny_vllm import _core, ops
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.course.lab import BLUE, GREY, ORANGE, Data, kernels, measured, say, section, table

VERSIONS = ("naive", "one adds", "tree", "shuffle", "vectorised")
BARRIERS = (0, 2, 9, 1, 1)
EPS = 1e-5
THREADS = 256  # of a block, in course/kernels/rms_norm.cu


def run(device: str) -> Data:
    rows, weight, tokens = _residual_rows()
    x = rows[-1]

    section("A row before and after")
    normed = ops.rms_norm(x[None], weight, EPS)[0]
    say(f"The row of the token {tokens[-1]!r} has {x.size} numbers, in float32.")
    table(
        ("", "root mean square", "smallest", "largest"),
        [
            ("x", f"{_rms(x):.4f}", f"{x.min():.3f}", f"{x.max():.3f}"),
            (
                "x / rms",
                f"{_rms(x / _rms(x)):.4f}",
                f"{(x / _rms(x)).min():.3f}",
                f"{(x / _rms(x)).max():.3f}",
            ),
            ("times weight", f"{_rms(normed):.4f}", f"{normed.min():.3f}", f"{normed.max():.3f}"),
        ],
    )
    say(f"A row ten times as long gives the same, to {_same_digits(x, weight)} decimal places.")

    section("Five kernels")
    on_gpu = device == "cuda"
    wide = np.ascontiguousarray(np.tile(rows, (1024 if on_gpu else 1, 4))[:, :2048])
    wide_weight = np.ascontiguousarray(np.tile(weight, 4)[:2048])
    reference = _reference(wide, wide_weight)
    library = kernels("rms_norm.cu", device)
    lines = []
    for version, name in enumerate(VERSIONS, 1):
        out = np.full_like(wide, np.nan)
        ms = ctypes.c_float()
        library("rms_norm", version, wide, wide_weight, EPS, out, *wide.shape, ctypes.byref(ms))
        error = np.abs(out - reference).max()
        right = "yes" if error < 1e-5 else f"no: {error:.3g}"
        line: tuple[Any, ...] = (
            version,
            name,
            _dependent_additions(version, 2048),
            BARRIERS[version - 1],
            right,
        )
        if on_gpu:
            line += (measured(ms.value * 1e3, "µs"), measured(2 * wide.nbytes / ms.value / 1e6, "GB/s"))
        lines.append(line)
    header: tuple[str, ...] = ("", "kernel", "additions in a row", "barriers", "right")
    table(header + (("time", "memory") if on_gpu else ()), lines)
    say(
        f"{wide.shape[0]} rows of {wide.shape[1]} numbers, on "
        + (_core.cuda_devices()[0][0].name if on_gpu else "a CPU that plays a GPU (course/kernels/simt.h)")
        + "."
    )

    section("A barrier is missing")
    out = np.full_like(wide, np.nan)
    library("rms_norm", 6, wide, wide_weight, EPS, out, *wide.shape, ctypes.byref(ctypes.c_float()))
    errors = np.abs(out - reference).max(axis=1) / np.abs(reference).max(axis=1)
    say(f"Wrong: {np.count_nonzero(errors > 1e-3)} of {errors.size} rows, the worst by {errors.max():.0%}.")

    section("The order of additions")
    squares = (wide[0] * wide[0]).astype(np.float32)
    one_by_one = np.float32(0)
    for square in squares:
        one_by_one += square
    halves = squares
    while halves.size > 1:
        halves = halves[: halves.size // 2] + halves[halves.size // 2 :]
    exact = float((squares.astype(np.float64)).sum())
    table(
        ("", "sum of squares", "error"),
        [
            ("one by one, float32", f"{one_by_one:.4f}", f"{abs(float(one_by_one) - exact):.1e}"),
            ("as a tree, float32", f"{halves[0]:.4f}", f"{abs(float(halves[0]) - exact):.1e}"),
            ("float64", f"{exact:.4f}", "-"),
        ],
    )
    return {
        "additions": {name: _dependent_additions(v, 2048) for v, name in enumerate(VERSIONS, 1)},
        "squares_of_a_row": [round(float(v), 5) for v in (x * x)[:192]],
    }


def _residual_rows() -> tuple[Any, Any, list[str]]:
    """What layer 0 of the small model reads: embedded tokens (8, D), and the weight (D) of its norm."""
    from tiny_vllm.tokenizer import Tokenizer

    folder = bundled_model_folder()
    checkpoint = _core.Checkpoint(str(folder))
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("The root mean square of a row of")[:8]
    table = checkpoint.numpy("model.embed_tokens.weight")
    weight = checkpoint.numpy("model.layers.0.input_layernorm.weight")
    return table[ids], weight, [tokenizer.decode([i]) for i in ids]


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(x.astype(np.float64) ** 2)))


def _same_digits(x: Any, weight: Any) -> int:
    """Decimal places in which x and 10 x agree after the norm."""
    difference = np.abs(ops.rms_norm(x[None], weight, EPS) - ops.rms_norm(10 * x[None], weight, EPS)).max()
    return int(-np.log10(2 * difference))


def _reference(x: Any, weight: Any) -> Any:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * weight


def _dependent_additions(version: int, dim: int) -> int:
    """How many additions must wait for each other, until the sum of a row is known."""
    own = dim // THREADS
    return {1: dim, 2: own + THREADS - 1, 3: own + 8, 4: own + 5 + 5, 5: own + 5 + 5}[version]


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    squares = np.array(data["squares_of_a_row"])
    left.fill_between(range(squares.size), squares, step="mid", color=BLUE, linewidth=0)
    left.axhline(squares.mean(), color=ORANGE, label=f"mean {squares.mean():.4f}")
    left.set(title="x² of 192 elements of an embedding", xlabel="element", ylabel="x²")
    left.legend()
    names = list(data["additions"])
    right.barh(names[::-1], [data["additions"][n] for n in names[::-1]], color=GREY)
    right.set(
        title="Additions that wait for each other", xlabel="for a row of 2,048 (log scale)", xscale="log"
    )
    for i, name in enumerate(names[::-1]):
        right.text(data["additions"][name] * 1.1, i, str(data["additions"][name]), va="center")
    right.set_xlim(1, 10_000)
