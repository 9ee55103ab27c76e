"""Floating point and bfloat16

The bits of a number, rounding, and sums that stop growing.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tiny_vllm import _core, ops
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.course.lab import BLUE, GREEN, ORANGE, Data, say, section, table

FORMATS: dict[str, tuple[Any, int, int]] = {  # numpy's type, bits of exponent and of mantissa
    "float32": (np.float32, 8, 23),
    "bfloat16": (ml_dtypes.bfloat16, 8, 7),
    "float16": (np.float16, 5, 10),
}
ADDITIONS = 4096


def run(device: str) -> Data:
    section("The bits of a number")
    lines: list[tuple[Any, ...]] = []
    for number in (1.0, -2.5, 0.1):
        for name in FORMATS:
            stored, text = _bits(number, name)
            lines.append((number, name, text, f"{stored:.10g}"))
    table(("number", "format", "sign·exponent·mantissa", "what is stored"), lines)

    section("The same two bytes")
    pair = np.array([0x3DE0], np.uint16)
    say(
        f"e0 3d, the weight of chapter 1, is {pair.view(ml_dtypes.bfloat16)[0]} as bfloat16 and "
        f"{pair.view(np.float16)[0]:.7g} as float16."
    )

    section("Range")
    lines = []
    for name, (kind, _, _) in FORMATS.items():
        limits: Any = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
        with np.errstate(over="ignore"):
            square = kind(300) * kind(300)
        lines.append(
            (
                name,
                limits.bits // 8,
                f"{float(limits.max):.3g}",
                f"{float(limits.tiny):.3g}",
                f"{float(limits.eps):.2g}",
                f"{float(square):.0f}",
            )
        )
    table(("format", "bytes", "largest", "smallest normal", "from 1 to the next", "300 x 300"), lines)

    section("Rounding")
    lines = []
    for x in (1.003, 1.00390625, 1.005, 1.01171875, 3.4e38):
        bits = _word(x)
        cut = _number(bits & 0xFFFF0000)
        nearest = _number(int(to_bfloat16(np.array([x], np.float32))[0]) << 16)
        lines.append((f"{x:.9g}", f"{bits & 0xFFFF:04x}", f"{cut:.9g}", f"{nearest:.9g}"))
    table(("float32", "lower half", "cut off", "to nearest, ties to even"), lines)
    numbers = np.random.default_rng(2).uniform(1, 2, 100_000).astype(np.float32)
    cut_off = (numbers.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    rounded = numbers.astype(ml_dtypes.bfloat16).astype(np.float32)
    say("The mean of 100,000 numbers between 1 and 2, compared with the true one:")
    table(
        ("", "error of the mean"),
        [("cut off", _percent(cut_off, numbers)), ("to nearest", _percent(rounded, numbers))],
    )

    section("What is no number")
    lines = []
    for bits in (0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF):
        engine = int(to_bfloat16(np.array([bits], np.uint32).view(np.float32))[0])
        carry = (bits + 0x7FFF + (bits >> 16 & 1)) % 2**32 >> 16
        row = [_number(word << 16) for word in (bits >> 16, carry, engine)]
        lines.append((f"{bits:08x}", _number(bits), *row))
    table(("bits", "float32", "cut off", "the carry alone", "the engine"), lines)

    section("A sum that stops growing")
    stops = {name: _running_sums(np.ones(ADDITIONS), kind) for name, (kind, _, _) in FORMATS.items()}
    ones = np.ones((1, ADDITIONS), ml_dtypes.bfloat16)
    product = float(ops.matmul(ones, ones, device=device)[0, 0])
    lines = [(f"added one by one in {name}", f"{sums[-1]:.0f}") for name, sums in stops.items()]
    lines.append(("the engine's product of ones, in bfloat16", f"{product:.0f}"))
    table((f"{ADDITIONS:,} ones", "sum"), lines)

    section("A sum of real numbers")
    row = _embedding_row()
    squares = row.astype(np.float64) ** 2
    exact = float(squares.sum())
    sums = {
        "bfloat16": float(_running_sums(squares, ml_dtypes.bfloat16)[-1]),
        "float32": float(np.float32(_running_sums(squares, np.float32)[-1])),
    }
    narrow = row.astype(ml_dtypes.bfloat16)[None]
    sums["the engine, rounded once"] = float(ops.matmul(narrow, narrow, device=device)[0, 0])
    table(
        ("accumulator", "sum of 576 squares", "error"),
        [(name, f"{value:.5f}", f"{abs(value / exact - 1):.1e}") for name, value in sums.items()]
        + [("float64", f"{exact:.5f}", "-")],
    )

    section("The order of additions")
    small, large = np.float32(1), np.float32(1e8)
    first, second = (large - large) + small, (large + small) - large
    say(f"In float32, (1e8 - 1e8) + 1 = {first:.0f}, and (1e8 + 1) - 1e8 = {second:.0f}.")
    rng = np.random.default_rng(2)
    wide = squares.astype(np.float32)
    shuffled = {float(np.add.accumulate(rng.permutation(wide))[-1]) for _ in range(1000)}
    say(f"The 576 squares, added in 1,000 orders, give {len(shuffled)} different sums in float32,")
    say(f"from {min(shuffled):.6f} to {max(shuffled):.6f}.")
    batch = np.random.default_rng(3).standard_normal((8, 576)).astype(ml_dtypes.bfloat16)
    weight = np.random.default_rng(4).standard_normal((64, 576)).astype(ml_dtypes.bfloat16)
    together = ops.matmul(batch, weight, out_dtype=np.float32, device=device)
    alone = np.concatenate(
        [ops.matmul(batch[i : i + 1], weight, out_dtype=np.float32, device=device) for i in range(8)]
    )
    same = _yes(np.array_equal(together, alone))
    say(f"The engine's product of a row, alone and among 8, the same bits: {same}.")

    return {
        "sums": {name: [float(v) for v in sums[31::32]] for name, sums in stops.items()},
        "gaps": {name: [mantissa, max_exponent(name)] for name, (_, _, mantissa) in FORMATS.items()},
    }


def to_bfloat16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """As the engine does when it loads weights: from a safetensors file of float32."""
    entry = {"dtype": "F32", "shape": list(numbers.shape), "data_offsets": [0, numbers.nbytes]}
    header = json.dumps({"x": entry}).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + numbers.tobytes())
        bits: npt.NDArray[np.uint16] = _core.SafetensorsFile(str(path)).numpy("x", "bfloat16")
    return bits


def max_exponent(name: str) -> int:
    """The largest number lies below 2 to the power of this plus one."""
    return int(2 ** (FORMATS[name][1] - 1)) - 1


def _word(x: float) -> int:
    return int(np.array([x], np.float32).view(np.uint32)[0])


def _number(word: int) -> float:
    return float(np.array([word], np.uint32).view(np.float32)[0])


def _bits(number: float, name: str) -> tuple[float, str]:
    kind, exponent, mantissa = FORMATS[name]
    stored = np.array([number]).astype(kind)
    word = int(stored.view(np.uint32 if stored.itemsize == 4 else np.uint16)[0])
    text = f"{word:0{1 + exponent + mantissa}b}"
    return float(stored[0]), f"{text[0]}·{text[1 : 1 + exponent]}·{text[1 + exponent :]}"


def _percent(rounded: Any, numbers: Any) -> str:
    error = float(rounded.mean(dtype=np.float64) / numbers.mean(dtype=np.float64) - 1)
    return f"{abs(error):.3%}"


def _running_sums(numbers: Any, kind: Any) -> list[Any]:
    """The sum after each addition, when each is rounded to this format."""
    total, sums = kind(0), []
    for number in numbers:
        total = kind(total + kind(number))
        sums.append(total)
    return sums


def _embedding_row() -> Any:
    checkpoint = _core.Checkpoint(str(bundled_model_folder()))
    return checkpoint.numpy("model.embed_tokens.weight")[504]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    colors = dict(zip(FORMATS, (BLUE, ORANGE, GREEN), strict=True))
    for name, sums in data["sums"].items():
        left.plot(range(32, ADDITIONS + 1, 32), sums, color=colors[name])
        left.annotate(
            f"{name}: {sums[-1]:.0f}",
            (ADDITIONS, sums[-1]),
            xytext=(-4, 5),
            textcoords="offset points",
            ha="right",
            color=colors[name],
        )
    left.set(title="Ones added one by one", xlabel="additions", ylabel="sum")
    for name, (mantissa, largest) in data["gaps"].items():
        exponents = range(-6, min(largest, 24) + 1)
        right.step(
            [2.0**e for e in exponents],
            [2.0 ** (e - mantissa) for e in exponents],
            where="post",
            color=colors[name],
            label=name,
        )
    right.axhline(2, color="black", linewidth=0.8, linestyle="--")
    right.set(title="How far the next number is", xlabel="number", ylabel="gap", xscale="log", yscale="log")
    right.legend()
