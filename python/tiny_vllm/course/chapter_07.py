"""Matrices: cublasGemmEx and the row-major trick

What cuBLAS is asked for, three products of our own, and why one row costs as much as sixty-four.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiny_vllm import _core, ops
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.course.chapter_03 import SECTOR, WARP, sectors_of
from tiny_vllm.course.lab import (
    BLUE,
    GREEN,
    ORANGE,
    Data,
    kernels,
    measured,
    read_report,
    say,
    section,
    table,
)

VERSIONS = ("naive", "tiled", "warp a row")
ROWS = (1, 2, 8, 16, 32, 64, 256, 2048, 8192)


@dataclass(frozen=True)
class Call:
    """What cublasGemmEx is told of a product, but for types: memory is read column after column."""

    op_a: str  # "N": as it is; "T": transposed
    op_b: str
    m: int
    n: int
    k: int
    a: Any  # memory: a flat array
    lda: int  # from the beginning of a column to that of the next
    b: Any
    ldb: int
    ldc: int


def gemm(call: Call, c: Any, beta: float = 0) -> None:
    """C (m × n) = op(A) (m × k) · op(B) (k × n) + beta · C, as the BLAS defines it; c is changed."""
    a = _columns(call.a, call.op_a, call.m, call.k, call.lda)
    b = _columns(call.b, call.op_b, call.k, call.n, call.ldb)
    out = np.lib.stride_tricks.as_strided(
        c, (call.m, call.n), (c.itemsize, c.itemsize * call.ldc), writeable=True
    )
    out[:] = a @ b + (beta * out if beta else 0)


def _columns(memory: Any, op: str, rows: int, columns: int, ld: int) -> Any:
    if op == "T":
        return _columns(memory, "N", columns, rows, ld).T
    return np.lib.stride_tricks.as_strided(
        memory, (rows, columns), (memory.itemsize, memory.itemsize * ld), writeable=False
    )


def run(device: str) -> Data:
    checkpoint = _core.Checkpoint(str(bundled_model_folder()))
    layer = "model.layers.0."
    q, k, v, o = (checkpoint.numpy(f"{layer}self_attn.{name}_proj.weight") for name in "qkvo")
    gate, up, down = (checkpoint.numpy(f"{layer}mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    x = _rows(checkpoint, 32)

    section("The products of a step")
    qkv, gate_up = np.concatenate([q, k, v]), np.concatenate([gate, up])
    head = checkpoint.numpy("model.embed_tokens.weight")
    shapes = (("qkv", qkv), ("o", o), ("gate_up", gate_up), ("down", down), ("head", head))
    table(
        ("weight", "N", "K", "in bfloat16", "multiplications a row"),
        [(name, *w.shape, f"{2 * w.size / 1e6:.2f} MB", f"{w.size:,}") for name, w in shapes],
    )
    total = 30 * sum(w.size for _, w in shapes[:-1]) + head.size
    say(f"30 layers and the head: {total:,} multiplications a row, {2 * total / 1e6:.0f} MB of weights.")

    section("One memory, two readings")
    memory = np.arange(1, 7)
    table(
        ("", "shape", "matrix"),
        [
            ("memory", "", " ".join(map(str, memory))),
            ("row after row", "(2, 3)", _text(memory.reshape(2, 3))),
            ("column after column", "(3, 2)", _text(memory.reshape(2, 3).T)),
        ],
    )

    section("What cuBLAS is asked for")
    right = ops.matmul(x, o, device=device)
    rows, n = x.shape[0], o.shape[0]
    w = o.ravel()
    calls = {
        "as in gemm.cu": Call("T", "N", n, rows, n, w, n, x.ravel(), n, n),
        "without OP_T": Call("N", "N", n, rows, n, w, n, x.ravel(), n, n),
        "x first": Call("T", "N", rows, n, n, x.ravel(), n, w, n, rows),
    }
    lines = []
    for name, call in calls.items():
        out = np.full_like(right, np.nan)
        gemm(call, out)
        lines.append((name, _error(out, right), _error(np.sort(out.ravel()), np.sort(right.ravel()))))
    table(("call", "largest error", "of the sorted numbers"), lines)
    say(f"x ({rows}, {n}) · oᵀ ({n}, {n}), beside ops.matmul, in parts of the largest number.")

    section("Added to what is there")
    residual = x[::-1].copy()
    out = residual.copy()
    gemm(calls["as in gemm.cu"], out, beta=1)
    added = ops.matmul_add(residual, x, o, device=device)
    say(f"beta = 1 beside ops.matmul_add: the largest error is {_error(out, added)}.")

    section("Three kernels")
    on_gpu = device == "cuda"
    sizes = (1, 512) if on_gpu else (1, 32)
    weight = np.ascontiguousarray(np.tile(o, (4, 4))[:2048, :2048] if on_gpu else k[:64])
    wide = np.ascontiguousarray(np.tile(x, (16, 4))[:512, : weight.shape[1]])
    library = kernels("matmul.cu", device)
    kernel_lines = []
    inner = weight.shape[1]
    for m in sizes:
        reference = wide[:m].astype(np.float64) @ weight.T.astype(np.float64)
        for version, name in enumerate(VERSIONS, 1):
            out, ms = np.full((m, weight.shape[0]), np.nan, np.float32), ctypes.c_float()
            part = np.ascontiguousarray(wide[:m])
            library("matmul", version, part, weight, out, m, *weight.shape, ctypes.byref(ms))
            good = np.abs(out - reference).max() < 1e-4 * np.abs(reference).max()
            line: tuple[Any, ...] = (
                m,
                name,
                _weight_loads(version, m),
                _used(version, inner),
                "yes" if good else "no",
            )
            if on_gpu:
                line += (
                    measured(ms.value * 1e3, "µs"),
                    measured(weight.nbytes / ms.value / 1e6, "GB/s"),
                    measured(2 * m * weight.size / ms.value / 1e6, "GFLOP/s"),
                )
            kernel_lines.append(line)
    header: tuple[str, ...] = ("rows", "kernel", "each weight is loaded", "used of a load", "right")
    table(header + (("time", "of the weight", "arithmetic") if on_gpu else ()), kernel_lines)
    where = _core.cuda_devices()[0][0].name if on_gpu else "a CPU that plays a GPU (course/kernels/simt.h)"
    say(f"A weight of {weight.shape[0]} x {weight.shape[1]} numbers, on {where}.")

    section("Few rows")
    report = read_report("cuda_kernels")
    found = {row["name"]: row for row in report["kernels"]}
    times = {m: found[f"cublas gate_up m={m}"]["us"] for m in ROWS}
    reads, computes = report["ceilings"]["read_gb_s"], report["ceilings"]["gemm_tflop_s"]
    columns, inner = 2 * 8192, 2048  # of gate_up at the 1B shape
    reading = 2 * columns * inner / reads / 1e3
    table(
        ("rows", "time", "µs a row", "TFLOP/s"),
        [
            (m, f"{us:.1f} µs", f"{us / m:.3f}", f"{2 * m * columns * inner / us / 1e6:.0f}")
            for m, us in times.items()
        ],
    )
    say(
        f"gate_up of the 1B shape ({columns:,}, {inner:,}) by cuBLAS, on one {report['device']} "
        f"(benchmarks/results/cuda_kernels.json). Reading the weight takes {reading:.1f} µs at "
        f"{reads:,.0f} GB/s; {2 * columns * inner / computes / 1e6:.2f} µs a row are its arithmetic, at "
        f"{computes:.0f} TFLOP/s."
    )
    return {
        "rows": list(times),
        "us": list(times.values()),
        "reading_us": round(reading, 2),
        "arithmetic_us_a_row": round(2 * columns * inner / computes / 1e6, 4),
    }


def _rows(checkpoint: Any, count: int) -> Any:
    """What layer 0 of the small model multiplies: normalised embeddings (count, D)."""
    x = checkpoint.numpy("model.embed_tokens.weight")[500 : 500 + count]
    return ops.rms_norm(x, checkpoint.numpy("model.layers.0.input_layernorm.weight"), 1e-5)


def _text(matrix: Any) -> str:
    return " / ".join(" ".join(map(str, row)) for row in matrix)


def _error(found: Any, right: Any) -> str:
    error = float(np.abs(found - right).max() / np.abs(right).max())
    return "less than 0.01%" if error < 1e-4 else f"{error:.0%}"


def _weight_loads(version: int, m: int) -> str:
    """How often each number of the weight is asked of device memory."""
    times = {1: m, 2: -(-m // 16), 3: -(-m // 8)}[version]
    return "once" if times == 1 else f"{times} times"


def _used(version: int, inner: int) -> str:
    """Which part of what a warp's first load of the weight fetches is wanted. float32."""
    addresses = {
        1: [4 * inner * (t % 16) for t in range(WARP)],  # 16 columns of out, twice: 16 rows of the weight
        2: [4 * inner * (t // 16) + 4 * (t % 16) for t in range(WARP)],  # 16 numbers of two rows
        3: [16 * t for t in range(WARP)],  # 16 bytes a thread
    }[version]
    size = 16 if version == 3 else 4
    return f"{size * len(set(addresses)) / (sectors_of(addresses, size) * SECTOR):.1%}"


def draw(data: Data, figure: Any) -> None:
    axes = figure.subplots()
    rows = np.array(data["rows"])
    fine = np.geomspace(1, rows[-1], 100)
    axes.loglog(rows, data["us"], "o-", color=BLUE, label="cuBLAS, one H200")
    axes.axhline(data["reading_us"], color=ORANGE, linestyle="--", label="reading the weight once")
    axes.loglog(
        fine, data["arithmetic_us_a_row"] * fine, ":", color=GREEN, label="arithmetic of the tensor cores"
    )
    axes.set(
        title="x (rows, 2048) · weight (16384, 2048)ᵀ in bfloat16",
        xlabel="rows of x",
        ylabel="time, µs",
        ylim=(5, 2000),
        xticks=rows,
    )
    axes.set_xticklabels([f"{m:,}" for m in data["rows"]])
    axes.minorticks_off()
    axes.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    axes.legend()
