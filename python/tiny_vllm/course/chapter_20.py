"""CUDA graphs, launch overhead, fused kernels, megakernels

What a step launches, what fusing and recording save, and what must not be in a recording.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiny_vllm import Engine, SamplingParams, _core
from tiny_vllm.course.lab import (
    BLUE,
    GREY,
    ORANGE,
    Data,
    kernels,
    measured,
    read_report,
    say,
    section,
    table,
)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)  # cuda_backend.cu
SMALL_KERNEL = 1.5  # µs: what a kernel costs that does next to nothing (docs/design.md)
LENGTHS = (6, 10, 14, 18, 22, 26, 30, 34, 38, 42)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    layers: int
    hidden: int  # D
    qkv: int  # (H + 2Hk) · Dh
    attention: int  # H · Dh
    width: int  # F
    vocab: int


ONE_B = Shape(layers=16, hidden=2048, qkv=3072, attention=2048, width=8192, vocab=128_256)
SMALL = Shape(layers=30, hidden=576, qkv=960, attention=576, width=1536, vocab=49_152)


def run(device: str) -> Data:
    on_gpu = device == "cuda"
    _where_the_time_goes()
    launches = _launches()
    _many_and_few(device)

    section("A recorded argument")
    x = np.arange(1, 9, dtype=np.float32)
    lengths = np.array([5, 6, 7, 8], np.int32)
    means = np.zeros((2, lengths.size), np.float32)
    library = kernels("launch.cu", device)
    for in_memory in (0, 1):
        library("replayed_means", in_memory, x, x.size, lengths, lengths.size, means[in_memory])
    table(
        ("step", "how it runs", "length", "right mean", "length as argument", "length in memory"),
        [
            (s + 1, ("as it is", "recorded", "replayed", "replayed")[s], n, x[:n].mean(), *means[:, s])
            for s, n in enumerate(lengths)
        ],
    )

    rows = _shapes_of_a_load(device)

    section("A step ahead")
    gpu = 0.91
    table(
        ("host's time a step", "one after the other", "a step ahead"),
        [
            (
                f"{host:.2f} ms",
                *(f"{_ends(host, gpu, 100, ahead)[-1] / 100:.2f} ms a token" for ahead in (False, True)),
            )
            for host in (0.05, 0.2, 0.5, 0.9, 1.5)
        ],
    )
    say(f"100 steps of a GPU that takes {gpu} ms for each.")
    if on_gpu:
        _count_on_the_gpu()
    return {"rows": rows, "padded": [padded_rows(n) for n in rows], "launches": launches}


def _where_the_time_goes() -> None:
    section("Where a step's time goes")
    report = read_report("cuda_kernels")
    us = {row["name"]: row["us"] for row in report["kernels"]}
    step = _step_times()[1]
    products = 16 * sum(
        us[f"{name} m=1"] for name in ("norm_gemv qkv", "gemv o", "norm_gemv_act_mul gate_up", "gemv down")
    )
    products += us["norm_gemv lm_head m=1"]
    others = 16 * (us["rope_and_cache m=1"] + us["attention_decode 1 x 160"])
    others += us["gather_rows embedding m=1"] + us["gather_rows logits m=1"] + us["sample greedy m=1"]
    weights = ONE_B.layers * (
        ONE_B.hidden * (ONE_B.qkv + ONE_B.attention + 3 * ONE_B.width) + 2 * ONE_B.hidden
    )
    weights += ONE_B.vocab * ONE_B.hidden + ONE_B.hidden
    reading = 2 * weights / report["ceilings"]["read_gb_s"] / 1e3
    table(
        ("", "µs", "of the step"),
        [
            ("one token, measured in the engine", f"{step:.0f}", "100%"),
            (f"reading {2 * weights / 1e9:.2f} GB of weights", f"{reading:.0f}", f"{reading / step:.0%}"),
            ("the products, timed alone", f"{products:.0f}", f"{products / step:.0%}"),
            ("all other kernels, timed alone", f"{others:.0f}", f"{others / step:.0%}"),
        ],
    )
    say(f"One {report['device']}, the 1B shape (benchmarks/results).")


def layer_kernels(shape: Shape, rows: int) -> list[str]:
    """What cuda_backend.cu launches for a layer, of a step with this many decodes."""
    qkv, o = (shape.qkv, shape.hidden), (shape.hidden, shape.attention)
    gate_up, down = (2 * shape.width, shape.hidden), (shape.hidden, shape.width)
    launched = ["norm_gemv"] if _takes_norm(rows, *qkv) else ["rms_norm", _product(rows, *qkv)]
    launched += ["rope_and_cache", "attention_decode", _product(rows, *o)]
    if not _takes(rows, *gate_up):
        launched += ["rms_norm", "gemm", "act_mul"]
    elif _takes_norm(rows, *gate_up):
        launched += ["norm_gemv_act_mul"]
    else:
        launched += ["rms_norm", "gemv_act_mul"]
    return [*launched, _product(rows, *down)]


def _product(rows: int, n: int, k: int) -> str:
    return "gemv" if _takes(rows, n, k) else "gemm"


def _takes(m: int, n: int, k: int) -> bool:  # gemv_takes() of gemv.cu
    return k % 8 == 0 and (m <= 8 or (m <= 16 and n * k <= 8 << 20))


def _takes_norm(m: int, n: int, k: int) -> bool:  # gemv_norm_takes()
    return m == 1 and k <= 4096 and _takes(m, n, k)


def step_kernels(shape: Shape, rows: int) -> int:
    head = 1 if _takes_norm(rows, shape.vocab, shape.hidden) else 2
    return shape.layers * len(layer_kernels(shape, rows)) + head + 3  # embedding, gather_rows, race


def _launches() -> Data:
    section("What a step launches")
    for rows in (1, 8, 64):
        say(f"A layer of {rows} row{'s' * (rows > 1)}: {', '.join(layer_kernels(ONE_B, rows))}.")
    each_layer, beside = 11, 5  # kernels, when each operation has its own
    steps = _step_times()
    one_each = [shape.layers * each_layer + beside for shape in (ONE_B, SMALL)]
    lines = [("one for each operation", 1, one_each[0], one_each[1])]
    lines += [("the engine", n, step_kernels(ONE_B, n), step_kernels(SMALL, n)) for n in (64, 8, 1)]
    table(
        (
            "kernels of a step",
            "rows",
            "1B shape",
            f"at {SMALL_KERNEL} µs",
            "of the engine's step",
            "small model",
        ),
        [
            (name, rows, big, f"{big * SMALL_KERNEL:.0f} µs", _of(big * SMALL_KERNEL, steps[rows]), small)
            for name, rows, big, small in lines
        ],
    )
    say(
        "The engine's steps take "
        + ", ".join(f"{steps[rows]:,.0f} µs for {rows} row{'s' * (rows > 1)}" for rows in (1, 8, 64))
        + " (benchmarks/results/cuda_engine.json)."
    )
    return {f"{name}, {rows} row{'s' * (rows > 1)}": big for name, rows, big, _ in lines}


def _step_times() -> dict[int, float]:
    """What a step of decodes takes on the GPU of the report, in µs, by its rows."""
    report = read_report("cuda_engine")
    found = {row["case"]: row["median"] for row in report["results"]}
    times = {1: found["batch 1, 32-token prompt, 128 new: per decoded token"] * 1e3}
    for rows in (8, 64):
        times[rows] = rows * 1e6 / found[f"batch {rows}, 128-token prompts, 256 new: decode alone"]
    return times


def _of(part: float, whole: float) -> str:
    return f"{part / whole:.0%}"


def _many_and_few(device: str) -> None:
    section("Many launches and few")
    on_gpu = device == "cuda"
    layers, n = 30, 1536
    rng = np.random.default_rng(20)
    x, gate, up = (rng.standard_normal(size).astype(np.float32) for size in (n, (layers, n), (layers, n)))
    wide = gate.astype(np.float64)
    right = x + (wide / (1 + np.exp(-wide)) * up).sum(axis=0)
    library = kernels("launch.cu", device)
    lines = []
    for version, name, moved in ((1, "three a layer", 8), (2, "fused", 4), (3, "all layers in one", 2)):
        for recorded in (0, 1):
            out, counts, ms = x.copy(), np.zeros(2, np.int32), ctypes.c_float()
            library("step", version, recorded, out, gate, up, n, layers, counts, ctypes.byref(ms))
            good = np.abs(out - right).max() < 1e-4
            # moved: numbers that a layer reads and writes, of n each. Version 3 has x at its ends only.
            numbers = (moved * layers + (2 if version == 3 else 0)) * n
            line: tuple[Any, ...] = (
                name + (", recorded" if recorded else ""),
                counts[1],
                counts[0],
                f"{4 * numbers / 1e6:.2f} MB",
                "yes" if good else "no",
            )
            if on_gpu:
                line += (measured(ms.value * 1e3, "µs"),)
            lines.append(line)
    header: tuple[str, ...] = ("", "kernels", "host's launches", "read and written", "right")
    table(header + (("time of a step",) if on_gpu else ()), lines)
    where = _core.cuda_devices()[0][0].name if on_gpu else "a CPU that plays a GPU (course/kernels/simt.h)"
    say(f"x += silu(gate) · up, {layers} times, for {n:,} numbers; on {where}.")


def padded_rows(rows: int) -> int:
    return next((size for size in SIZES if rows <= size), rows)


def _padded_width(width: int) -> int:
    padded = 8
    while padded < width:
        padded *= 2
    return padded


def _shapes_of_a_load(device: str) -> list[int]:
    """Ten requests of different lengths; returns the rows of each step of decodes."""
    section("Shapes of a load")
    engine = Engine(device=device, record_events=True, max_num_seqs=8, max_model_len=256)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in LENGTHS]
    prompts = [f"Here are {n} words about the number {n}:" for n in LENGTHS]
    engine.generate(prompts, params)
    events = engine.events()
    block_size, steps = events.engine["block_size"], [s for s in events.steps if s["chunks"]]
    decodes = [s["chunks"] for s in steps if all(count == 1 for _, _, count in s["chunks"])]
    shapes = [
        (len(chunks), max(-(-(start + count) // block_size) for _, start, count in chunks))
        for chunks in decodes
    ]
    lines = []
    padded = [(padded_rows(rows), _padded_width(width)) for rows, width in shapes]
    for name, found in (("as they are", shapes), ("padded", padded)):
        times = Counter(found).values()
        replayed = sum(max(0, n - 2) for n in times)
        lines.append((name, len(times), len(times), sum(n > 1 for n in times), replayed))
    table(("shapes of steps", "different", "run as they are", "recorded", "replayed"), lines)
    empty = sum(p - r for (r, _), (p, _) in zip(shapes, padded, strict=True))
    computed = sum(p for p, _ in padded)
    say(
        f"{len(prompts)} requests, at most 8 at a time: {len(steps)} steps, {len(decodes)} of them of "
        f"decodes alone. Padding adds {empty} rows to {computed - empty}."
    )
    metrics = engine.metrics()
    scheduling = metrics["schedule_seconds"] / metrics["num_steps"]
    if device == "cpu":
        say(f"To schedule a step took {measured(scheduling * 1e6, 'µs')}.")
    return [rows for rows, _ in shapes]


def _ends(host: float, gpu: float, steps: int, ahead: bool) -> list[float]:
    """When the GPU is done with each step; the host works `host` on a step before the GPU can begin."""
    host_end, gpu_end = [0.0], [0.0, 0.0]
    for _ in range(steps):
        # Two steps may be on their way: the host waits for the last but one, or for the last.
        begin = max(host_end[-1], gpu_end[-2] if ahead else gpu_end[-1])
        host_end.append(begin + host)
        gpu_end.append(max(host_end[-1], gpu_end[-1]) + gpu)
    return gpu_end[2:]


def _count_on_the_gpu() -> None:
    section("Counted on the GPU")
    engine = Engine(device="cuda", profile=True)
    engine.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=4))
    records = engine.take_profile()
    last = max(r.step for r in records)
    names = Counter(r.name for r in records if r.step == last)
    say(f"A decode of the small model: {sum(names.values())} kernels. {dict(names)}")


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(4, 3))
    steps = np.arange(1, len(data["rows"]) + 1)
    left.fill_between(steps, data["padded"], step="mid", color=ORANGE, linewidth=0, label="rows of padding")
    left.fill_between(steps, data["rows"], step="mid", color=BLUE, linewidth=0, label="rows of requests")
    left.set(
        title="Steps of decodes, padded to few shapes",
        xlabel="step of decodes",
        ylabel="rows",
        ylim=(0, 9.9),
        yticks=(1, 2, 4, 8),
    )
    left.legend()
    names = list(data["launches"])[::-1]
    right.barh(names, [data["launches"][name] for name in names], color=GREY)
    right.set(title="Kernels of a step", xlabel="launches, 1B shape", xlim=(0, 220))
    for i, name in enumerate(names):
        right.text(data["launches"][name] + 3, i, str(data["launches"][name]), va="center")
