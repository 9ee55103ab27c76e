"""FlashAttention-style prefill

What storing the scores costs, four kernels that need fewer and fewer bytes, and a tile too few.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tiny_vllm import _core
from tiny_vllm.course.lab import BLUE, GREY, ORANGE, Data, kernels, measured, say, section, table
from tiny_vllm.course.layers import SmallModel

TEXT = """The cat sat on the mat because it was tired. The dog was not tired. It wanted to play, so it went to
the mat and looked at the cat until the cat got up and left the room. Then the dog was alone. It lay
down on the mat, which was still warm, and after a while it was tired, too. When the cat came back,
the dog was asleep."""
LAYER = 13
KEYS = 16  # of a tile, in course/kernels/flash_attention.cu
VERSIONS = (
    ("scores in memory", 0),
    ("tiles of 16 rows", 16),
    ("hidden tiles skipped", 16),
    ("tiles of 32 rows", 32),
)
ONE_B = {"heads": 32, "kv_heads": 8, "head_dim": 64}  # the shape of Llama-3.2-1B
LENGTHS = (128, 512, 2048, 8192, 32768)
Array = Any
Result = tuple[Array, Array, float]


def run(device: str) -> Data:
    memory = _show_memory()
    model = SmallModel(device)
    ids = model.tokenizer.encode(" ".join(TEXT.split()))
    rotated = model.rotated(model.qkv(ids, LAYER))
    q, k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in model.split(rotated))
    group = model.heads // model.kv_heads
    heads = slice(model.heads - group, model.heads)  # the query heads of the last key head: enough for a CPU
    expected = model.attention(rotated).reshape(len(ids), model.heads, model.head_dim).swapaxes(0, 1)[heads]
    inputs = np.ascontiguousarray(q[heads]), np.ascontiguousarray(k[-1:]), np.ascontiguousarray(v[-1:])
    library = kernels("flash_attention.cu", device)
    results = {version: _run_kernel(library, version, inputs) for version in range(1, 6)}
    _show_kernels(results, expected, library, device)
    _show_skipping(results, expected)
    _show_intensity()
    return {"lengths": LENGTHS, **memory, "tokens": len(ids), "visited": results[3][1][0].tolist()}


def _show_memory() -> Data:
    section("What the scores weigh")
    scores, rest, lines = [], [], []
    heads, kv_heads, dim = ONE_B.values()
    for tokens in LENGTHS:
        scores.append(4 * heads * tokens**2)
        rest.append(2 * (2 * heads + 2 * kv_heads) * dim * tokens)
        lines.append((f"{tokens:,}", _size(scores[-1]), _size(rest[-1]), f"{scores[-1] / rest[-1]:.0f}"))
    table(("tokens", "scores, float32", "q, k, v and out, bfloat16", "ratio"), lines)
    say("One layer of the shape of Llama-3.2-1B: 32 query heads, 8 key heads of 64 numbers.")
    return {"scores": scores, "rest": rest}


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _run_kernel(library: Any, version: int, inputs: tuple[Array, Array, Array], runs: int = 1) -> Result:
    """out (H, T, 64), visited (H, tiles of rows), and milliseconds."""
    q, k, _ = inputs
    heads, tokens = q.shape[:2]
    out, ms = np.full_like(q, np.nan), ctypes.c_float()
    rows = 16 if version <= 3 else 32
    visited = np.zeros((heads, -(-tokens // rows)), np.int32)
    sizes = heads, k.shape[0], tokens, runs
    library("flash_attention", version, *inputs, out, visited, *sizes, ctypes.byref(ms))
    return out, visited, ms.value


def _show_kernels(results: dict[int, Result], expected: Array, library: Any, device: str) -> None:
    section("Four kernels")
    on_gpu = device == "cuda"
    heads, tokens, dim = expected.shape
    large = _large_inputs() if on_gpu else None
    lines = []
    for version, (name, rows) in enumerate(VERSIONS, 1):
        out, visited, _ = results[version]
        error = np.abs(out - expected).max()
        line: tuple[Any, ...] = (
            version,
            name,
            "0" if rows else f"{heads * tokens**2:,}",
            f"{visited.sum():,}" if rows else "-",
            f"{visited.sum() * KEYS * dim * 4 * 2:,}" if rows else "-",
            "yes" if error < 1e-4 else f"no: {error:.3g}",
        )
        if large:
            ms = _run_kernel(library, version, large, runs=5)[2]
            large_heads, large_tokens = large[0].shape[:2]
            operations = 4 * dim * large_heads * large_tokens * (large_tokens + 1) / 2
            line += (measured(ms * 1e3, "µs"), measured(operations / ms / 1e6, "GFLOP/s"))
        lines.append(line)
    header: tuple[str, ...] = (
        "",
        "kernel",
        "scores stored",
        "tiles read",
        "bytes of keys and values",
        "right",
    )
    table(header + (("time", "speed") if on_gpu else ()), lines)
    say(
        f"{heads} heads, {tokens} tokens of layer {LAYER}, on "
        + (_core.cuda_devices()[0][0].name if on_gpu else "a CPU that plays a GPU (course/kernels/simt.h)")
        + "."
    )
    if on_gpu:
        say("Times are of 32 heads, 8 key heads and 2,048 tokens; speeds count visible pairs only.")


def _large_inputs() -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((heads, 2048, 64), dtype=np.float32) for heads in (32, 8, 8))
    return q, k, v


def _show_skipping(results: dict[int, Result], expected: Array) -> None:
    section("A tile too few")
    tokens = expected.shape[1]
    lines = []
    for version, rows, name in ((3, 16, "last row"), (4, 32, "last row"), (5, 32, "first row")):
        out, visited, _ = results[version]
        wrong = ~(np.abs(out - expected).max(axis=(0, 2)) < 1e-4)
        places = f"{', '.join(_ranges(np.flatnonzero(wrong).tolist()))}" if wrong.any() else "none"
        lines.append((rows, name, int(visited[0].sum()), f"{np.count_nonzero(wrong)} of {tokens}", places))
    table(("rows of a tile", "keys end with the", "tiles read a head", "rows wrong", "which"), lines)


def _ranges(numbers: list[int]) -> list[str]:
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return [f"{a}-{b}" for a, b in parts]


def _show_intensity() -> None:
    section("Operations for each byte")
    dim = ONE_B["head_dim"]
    lines = []
    for rows, what in (
        (1, "one row"),
        (16, "ours"),
        (128, "attention_prefill"),
        (192, "attention_prefill_hopper"),
    ):
        operations, read = 4 * dim * rows, 2 * dim * 2
        lines.append((what, rows, f"{operations:,}", read, f"{operations / read:.0f}"))
    table(("", "rows", "operations a key", "bytes a key, bfloat16", "operations a byte"), lines)


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    tokens, visited = data["tokens"], data["visited"]
    count = len(visited)
    for row, tiles in enumerate(visited):
        for tile in range(count):
            kind = 2 if tile >= tiles else 1 if tile == row else 0
            color = (BLUE, ORANGE, "#e2e8f0")[kind]
            left.add_patch(_rectangle(tile, row, color))
    for x, y, color, label in ((1.5, 3.5, "white", "visible"), (4.5, 1.5, "black", "skipped")):
        left.text(x, y, label, color=color, ha="center", va="center", fontsize=9)
    for place in range(count):
        left.text(place + 0.5, place + 0.5, "mask", color="white", ha="center", va="center", fontsize=9)
    left.set(
        title=f"Tiles of 16 rows and 16 keys, {tokens} tokens",
        xlabel="first key of the tile",
        ylabel="first query",
        xlim=(0, count),
        ylim=(count, 0),
    )
    ticks = [i + 0.5 for i in range(count)], [str(KEYS * i) for i in range(count)]
    left.set_xticks(*ticks)
    left.set_yticks(*ticks)
    right.plot(data["lengths"], data["scores"], color=ORANGE, marker="o", label="scores")
    right.plot(data["lengths"], data["rest"], color=GREY, marker="o", label="q, k, v and out")
    right.set(
        title="Bytes of one layer, 1B shape", xlabel="tokens", ylabel="bytes", xscale="log", yscale="log"
    )
    right.legend()


def _rectangle(x: float, y: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, facecolor=color)
