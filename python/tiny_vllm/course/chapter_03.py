"""Host and device memory, and what a kernel is

A first kernel, which thread does what, and how many pieces of memory a warp asks for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiny_vllm import _core
from tiny_vllm.course.lab import BLUE, GREEN, GREY, ORANGE, Data, kernels, measured, say, section, table
from tiny_vllm.errors import Error

N, THREADS = 1000, 256
WARP, SECTOR = 32, 32  # threads; bytes
VERSIONS = ("one each", "side by side", "in step")
GUARD = -1.0


def run(device: str) -> Data:
    on_gpu = device == "cuda"
    blocks = -(-N // THREADS)

    section("Which thread does what")
    say(f"{N} numbers in blocks of {THREADS} threads: {blocks} blocks, {blocks * THREADS} threads.")
    table(
        ("number", "block", "thread in the block", "warp in the block"),
        [(i, i // THREADS, i % THREADS, i % THREADS // WARP) for i in (0, 31, 32, 255, 256, 600, 999)],
    )
    say(f"{blocks * THREADS - N} threads of the last block have no number.")

    section("Three copies")
    n = 1 << 26 if on_gpu else N
    room = -(-n // (8 * THREADS)) * 8 * THREADS
    x = np.arange(room, dtype=np.float32)
    library = kernels("first.cu", device)
    lines = []
    for version, name in enumerate(VERSIONS, 1):
        out, ms = np.full(room, GUARD, np.float32), ctypes.c_float()
        library("copy", version, x, out, n, room, THREADS, ctypes.byref(ms))
        right = np.array_equal(out[:n], x[:n]) and bool((out[n:] == GUARD).all())
        stride = 8 if version == 2 else 1
        sectors = sectors_of([4 * stride * t for t in range(WARP)], 4)
        line: tuple[Any, ...] = (
            version,
            name,
            f"{0}, {stride}, {2 * stride}, .. {31 * stride}",
            sectors,
            f"{WARP * 4 / (sectors * SECTOR):.1%}",
            "yes" if right else "no",
        )
        if on_gpu:
            line += (measured(ms.value * 1e3, "µs"), measured(8 * n / ms.value / 1e6, "GB/s"))
        lines.append(line)
    header: tuple[str, ...] = ("", "kernel", "first load of a warp", "sectors", "used", "right")
    table(header + (("time", "memory") if on_gpu else ()), lines)
    where = _core.cuda_devices()[0][0].name if on_gpu else "a CPU that plays a GPU (course/kernels/simt.h)"
    say(f"{n:,} numbers, on {where}.")

    section("The check is missing")
    room = 2 * THREADS * blocks
    out = np.full(room, GUARD, np.float32)
    x = np.arange(room, dtype=np.float32)
    library("copy", 4, x, out, N, room, THREADS, ctypes.byref(ctypes.c_float()))
    say(
        f"The {N} numbers are {'right' if np.array_equal(out[:N], x[:N]) else 'wrong'}. "
        f"Behind them, {np.count_nonzero(out[N:] != GUARD)} numbers of somebody else were overwritten."
    )

    section("A launch that cannot be")
    out = np.full(N, GUARD, np.float32)
    try:
        library("copy", 1, x, out, N, 2048, 2048, ctypes.byref(ctypes.c_float()))
    except Error as error:
        say(f"With a check: {error}")
    library("careless_copy", x, out, N, 2048)
    say(f"Without: no message, and {np.count_nonzero(out == GUARD)} of {N} numbers were never written.")

    section("What a warp's load touches")
    table(
        ("32 threads load", "bytes", "sectors", "used"),
        [
            _pattern("neighbouring float32", 4, 4),
            _pattern("neighbouring bfloat16", 2, 2),
            _pattern("neighbouring 16 bytes (float4)", 16, 16),
            _pattern("neighbouring float32, one off", 4, 4, start=4),
            _pattern("every second float32", 8, 4),
            _pattern("every eighth float32", 32, 4),
            _pattern("a column of a (.., 576) float32 matrix", 576 * 4, 4),
            _pattern("all of them the same float32", 0, 4),
        ],
    )
    strides = range(1, 17)
    return {
        "strides": list(strides),
        "sectors": {
            str(size): [sectors_of([size * s * t for t in range(WARP)], size) for s in strides]
            for size in (2, 4, 16)
        },
    }


def sectors_of(addresses: Sequence[int], size: int) -> int:
    """How many sectors hold the `size` bytes at each of these addresses."""
    return len({byte // SECTOR for address in addresses for byte in (address, address + size - 1)})


def _pattern(name: str, distance: int, size: int, start: int = 0) -> tuple[Any, ...]:
    addresses = [start + distance * t for t in range(WARP)]
    sectors = sectors_of(addresses, size)
    wanted = size * len(set(addresses))
    return name, wanted, sectors, f"{wanted / (sectors * SECTOR):.1%}"


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    threads = np.arange(WARP)
    for stride, colour in ((8, ORANGE), (2, GREEN), (1, BLUE)):
        left.plot(4 * stride * threads, threads, ".", color=colour, label=f"stride {stride}")
    for sector in range(0, 1025, SECTOR):
        left.axvline(sector, color=GREY, linewidth=0.3)
    left.set(
        title="What the threads of a warp read",
        xlabel="address, bytes (a line is the edge of a sector)",
        ylabel="thread of the warp",
    )
    left.legend(loc="lower right")
    for (size, sectors), style in zip(data["sectors"].items(), ("s-", "o-", "^-"), strict=True):
        right.plot(data["strides"], sectors, style, markersize=4, label=f"{size} bytes a thread")
    right.set(
        title="Sectors of one load",
        xlabel="stride: distance between threads, in numbers",
        ylabel="sectors of 32 bytes",
        ylim=(0, 36),
        xticks=(1, 4, 8, 12, 16),
    )
    right.legend(loc="lower right")
