"""Measuring, and how not to fool yourself

One kernel timed badly and then well, a prompt that was computed before, a trace of the engine, and what a
recorded report of a GPU says when its bytes stand beside its times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tiny_vllm import Engine, SamplingParams, _core, ops
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.course.lab import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    Data,
    measured,
    read_report,
    say,
    section,
    table,
)
from tiny_vllm.cuda_libraries import find_cuda_libraries

LAYERS = 30
COPIES = 5  # of the weights of all layers: together they are larger than most caches

# A step of one request at the 1B shape: rows of benchmarks/results/cuda_kernels.json, how often each runs.
STEP = {
    "gather_rows embedding m=1": 1,
    "norm_gemv qkv m=1": 16,
    "rope_and_cache m=1": 16,
    "attention_decode 1 x 160": 16,
    "gemv o m=1": 16,
    "norm_gemv_act_mul gate_up m=1": 16,
    "gemv down m=1": 16,
    "norm_gemv lm_head m=1": 1,
    "sample greedy m=1": 1,
}


def run(device: str) -> Data:
    find_cuda_libraries(device)  # _core.Ops does not look for cuBLAS itself
    ceiling = _one_kernel(device)
    _long_is_not_slow(device, ceiling)
    _computed_before(device)
    _trace(device)
    _cost_of_events()
    if device == "cuda":
        _profile()
    return _gpu_report()


# ---- one kernel


def _one_kernel(device: str) -> float:
    checkpoint = _core.Checkpoint(str(bundled_model_folder()))
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(LAYERS)]
    arrays = [checkpoint.numpy(name, "bfloat16").view(ops.bfloat16) for name in names]  # (576, 1536) each
    x = np.ones((1, arrays[0].shape[1]), ops.bfloat16)
    megabytes = arrays[0].nbytes / 1e6

    ceiling = _ceiling(device)
    engine = _core.Ops(device)
    weights = [engine.array(a.view(np.uint16)) for a in arrays * COPIES]  # 265 MB
    dx, out = engine.array(x.view(np.uint16)), engine.empty([1, arrays[0].shape[0]], "bfloat16")

    def product(i: int) -> None:
        engine.matmul(dx, weights[i % len(weights)], None, out)

    # A GPU's launches return at once; out.numpy() waits for them, and costs more than a launch. So there are
    # 20 calls before each wait.
    calls = 20 if device == "cuda" else 1
    every = _samples(product, out.numpy, 20, calls)
    first, cold = every[0], every
    copied = _samples(lambda i: ops.matmul(x, arrays[i % LAYERS], device=device), lambda: None, 20, 1)
    same = _samples(lambda i: product(0), out.numpy, 200, calls)
    good = _samples(product, out.numpy, 200, calls)
    right = statistics.median(good)

    section("One kernel, timed in five ways")
    say(f"A product of one row with a weight of (576, 1536): {megabytes:.2f} MB must be read.")
    ways = [
        ("the first call", first),
        ("mean of 20, the first among them", statistics.mean(cold)),
        ("with the copies that ops.matmul makes", statistics.median(copied)),
        ("the same weight each time, median of 200", statistics.median(same)),
        ("the weights in turn, median of 200", right),
    ]
    if device == "cuda":
        launches = _samples(product, lambda: None, 20, calls)
        out.numpy()
        ways.append(("the same, but nobody waits for the GPU", statistics.median(launches)))
    table(
        ("how", "time a call", "that would be"),
        [
            (how, measured(seconds * 1e6, "µs"), measured(megabytes / seconds / 1e3, "GB/s"))
            for how, seconds in ways
        ],
    )

    section("Beside the machine's ceiling")
    ceiling = max(ceiling, _ceiling(device))  # before and after: others may use this machine too
    low, high = np.percentile(good, [10, 90])
    table(
        ("", "value"),
        [
            ("this machine reads", measured(ceiling, "GB/s")),
            ("so the weight needs at least", measured(megabytes / ceiling * 1e3, "µs")),
            ("the kernel took, median", measured(right * 1e6, "µs")),
            ("8 of 10 calls took from", measured(low * 1e6, "µs")),
            ("to", measured(high * 1e6, "µs")),
            ("share of the ceiling", measured(100 * megabytes / right / 1e3 / ceiling, "%")),
        ],
    )
    return ceiling


def _samples(
    call: Callable[[int], object], wait: Callable[[], object], count: int, calls: int
) -> list[float]:
    """Seconds of a call, `count` times; each of these is the mean of `calls` calls between two waits."""
    result = []
    for n in range(count):
        wait()
        start = time.perf_counter()
        for i in range(calls):
            call(n * calls + i)
        wait()
        result.append((time.perf_counter() - start) / calls)
    return result


def _ceiling(device: str) -> float:
    """GB/s: what a plain read reaches; on a GPU, a product of one row with half a gigabyte."""
    if device != "cuda":
        return ops.measure_read_bandwidth(bytes=1 << 28)
    engine = _core.Ops(device)
    weight = engine.empty([65536, 4096], "bfloat16")
    x, out = engine.empty([1, 4096], "bfloat16"), engine.empty([1, 65536], "bfloat16")
    samples = _samples(lambda _: engine.matmul(x, weight, None, out), out.numpy, 10, 20)
    return 65536 * 4096 * 2 / min(samples) / 1e9


def _long_is_not_slow(device: str, ceiling: float) -> None:
    engine = _core.Ops(device)
    calls = 20 if device == "cuda" else 1
    checkpoint = _core.Checkpoint(str(bundled_model_folder()))
    head = checkpoint.numpy("model.embed_tokens.weight", "bfloat16")  # bits
    x, norm = engine.array(head[:1]), engine.array(checkpoint.numpy("model.norm.weight", "bfloat16"))
    heads = [engine.array(head) for _ in range(COPIES)]
    normed, logits = engine.empty([1, 576], "bfloat16"), engine.empty([1, head.shape[0]], "float32")
    moved_by_head = head.nbytes + 4 * head.shape[0]
    cases: list[tuple[str, int, Callable[[int], object], Callable[[], object]]] = [
        ("rms_norm (576)", 3 * 576 * 2, lambda _: engine.rms_norm(x, norm, 1e-5, normed), normed.numpy),
        (
            "head (49152, 576), always one",
            moved_by_head,
            lambda _: engine.matmul(x, heads[0], None, logits),
            logits.numpy,
        ),
        (
            "head, five copies in turn",
            moved_by_head,
            lambda i: engine.matmul(x, heads[i % COPIES], None, logits),
            logits.numpy,
        ),
    ]
    lines = []
    for name, moved, call, wait in cases:
        seconds = statistics.median(_samples(call, wait, 40, calls)[10:])
        rate = moved / seconds / 1e9
        lines.append(
            (
                name,
                measured(seconds * 1e6, "µs"),
                f"{moved / 1e6:.3f} MB",
                measured(rate, "GB/s"),
                measured(100 * rate / ceiling, "%"),
            )
        )
    section("Long is not slow")
    table(("kernel", "time", "must move", "rate", "of the ceiling"), lines)


# ---- the engine


def _computed_before(device: str) -> None:
    section("A prompt that was computed before")
    engine = Engine(device=device, max_model_len=512, kv_cache_memory_bytes=64 << 20)
    prompt = [(7919 * i) % 49152 for i in range(400)]
    lines = []
    for name in ("to warm up", "measured", "measured again"):
        start = time.perf_counter()
        before = engine.metrics()["num_computed_tokens"]
        output = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))[0]
        seconds = time.perf_counter() - start
        computed = engine.metrics()["num_computed_tokens"] - before
        lines.append(
            (name, len(output.prompt_token_ids), int(computed), measured(400 / seconds, "tok/s", digits=2))
        )
    table(("run", "prompt", "computed", "prefill, it seems"), lines)


def _trace(device: str) -> None:
    engine = Engine(
        device=device,
        record_events=True,
        max_num_batched_tokens=8,
        max_model_len=512,
        kv_cache_memory_bytes=16 << 20,
        enforce_eager=True,  # on a GPU, so that the steps are the CPU's
    )
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("a", "The capital of France is", greedy)
    engine.add_request("b", "The three primary colors are red,", greedy)
    while engine.has_unfinished_requests():
        engine.step()
    events = engine.events()
    section("A trace in words")
    print(events)

    section("Where the time of a step goes")
    steps = [s for s in events.steps if s["chunks"]][2:]  # the first two are cold
    parts: dict[str, list[float]] = {"scheduling": [], "forward pass": [], "sampling and bookkeeping": []}
    between = []
    for i, step in enumerate(steps):
        begin, forward, forward_end, end = step["times"]
        for name, seconds in zip(
            parts, (forward - begin, forward_end - forward, end - forward_end), strict=True
        ):
            parts[name].append(seconds)
        if i:
            between.append(begin - steps[i - 1]["times"][3])
    parts["outside of the steps (Python)"] = between
    medians = {name: statistics.median(seconds) for name, seconds in parts.items()}
    whole = sum(medians.values())
    table(
        ("part", "median of a step", "share"),
        [
            (name, measured(seconds * 1e6, "µs"), measured(100 * seconds / whole, "%", digits=2))
            for name, seconds in medians.items()
        ],
    )
    say(f"{len(steps)} steps were looked at; the first two are left out.")


def _cost_of_events() -> None:
    section("A difference and its spread")
    report = read_report("events_cuda")
    lines = []
    for row in report["results"]:
        cost, spread = row["cost_percent"], row["spread_percent"]
        verdict = "slower" if cost > spread else "faster" if cost < -spread else "cannot tell"
        lines.append((row["case"], f"{cost:+.2f} %", f"{spread:.2f} %", verdict))
    table(("load", "cost of recording", "spread without it", "what we may say"), lines)
    say(f"benchmarks/results/events_cuda.json, {report['rounds']} rounds of each.")


def _profile() -> None:
    """What `tiny-vllm bench --profile` records, of four decode steps of the small model."""
    engine = Engine(device="cuda", profile=True, enable_prefix_caching=False, max_model_len=512)
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine.generate([[1, 2, 3]], greedy)
    engine.take_profile()  # the first run's: kernels are loaded when they are first used
    engine.generate([[1, 2, 3]], greedy)
    records = [r for r in engine.take_profile() if r.tokens == 1]
    names = sorted(
        {r.name for r in records}, key=lambda n: -sum(r.duration_us for r in records if r.name == n)
    )
    steps = len({r.step for r in records})
    lines = []
    for name in names[:10]:
        mine = [r for r in records if r.name == name]
        us = sum(r.duration_us for r in mine)
        moved = sum(r.bytes for r in mine)
        lines.append(
            (
                name,
                len(mine) // steps,
                measured(us / len(mine), "µs"),
                measured(moved / us / 1e3, "GB/s") if moved else "-",
            )
        )
    section("Every kernel of a step")
    table(("kernel", "calls a step", "mean", "rate"), lines)


# ---- a recorded report


def _ideal_us(kernel: dict[str, Any], read_gb_s: float, tflop_s: float) -> float:
    """The time that the larger of the two limits allows."""
    return max(float(kernel["bytes"]) / read_gb_s / 1e3, float(kernel["flops"]) / tflop_s / 1e6)


def _gpu_report() -> Data:
    report = read_report("cuda_kernels")
    read, copy = report["ceilings"]["read_gb_s"], report["ceilings"]["copy_gb_s"]
    peak = report["ceilings"]["gemm_tflop_s"]
    by_name = {k["name"]: k for k in report["kernels"]}

    section("A step of a GPU, from its report")
    say(
        f"{report['device']}: {read:,.0f} GB/s read, {copy:,.0f} GB/s copied, {peak:,.0f} TFLOP/s. "
        "One request, 160 tokens of context, the shape of Llama-3.2-1B."
    )
    lines, total, total_ideal = [], 0.0, 0.0
    for name, calls in STEP.items():
        kernel = by_name[name]
        ideal = _ideal_us(kernel, read, peak)
        total += calls * kernel["us"]
        total_ideal += calls * ideal
        lines.append(
            (
                name,
                calls,
                f"{kernel['us']:.1f}",
                f"{ideal:.2f}",
                f"{ideal / kernel['us']:.0%}",
                f"{calls * (kernel['us'] - ideal):.0f}",
            )
        )
    table(("kernel", "calls", "µs a call", "at least", "share", "lost in a step, µs"), lines)
    engine = read_report("cuda_engine")
    step = next(r for r in engine["results"] if r["case"].startswith("batch 1,"))
    say(
        f"Together {total:.0f} µs, where the bytes need {total_ideal:.0f} µs. "
        f"The whole engine, measured by itself, takes {step['median'] * 1e3:.0f} µs a token "
        "(benchmarks/results/cuda_engine.json)."
    )

    section("Above the ceiling")
    above = []
    for kernel in report["kernels"]:
        gb_s, tflop_s = kernel["bytes"] / kernel["us"] / 1e3, kernel["flops"] / kernel["us"] / 1e6
        if gb_s > copy:
            above.append((kernel["name"], f"{gb_s:,.0f} GB/s", f"{gb_s / copy:.0%} of the copy", gb_s > read))
        if tflop_s > peak:
            above.append(
                (kernel["name"], f"{tflop_s:,.0f} TFLOP/s", f"{tflop_s / peak:.0%} of the product", True)
            )
    table(
        ("kernel", "rate", "share", "above the read or the product"),
        [(n, rate, share, "yes" if over else "no") for n, rate, share, over in above],
    )
    points = [
        (
            round(k["flops"] / k["bytes"], 3),
            round(k["flops"] / k["us"] / 1e6, 3),
            _kind(k["name"]),
        )
        for k in report["kernels"]
        if k["flops"] and _kind(k["name"])
    ]
    return {"read_gb_s": read, "tflop_s": peak, "points": points, "device": report["device"]}


def _kind(name: str) -> str:
    if name.startswith("attention_decode"):
        return "attention, decode"
    if name.startswith("attention_prefill_hopper"):
        return "attention, prefill"
    if name.startswith("cublas"):
        return "product, cuBLAS"
    if "gemv" in name:
        return "product, our gemv"
    return ""


def draw(data: Data, figure: Any) -> None:
    axes = figure.subplots()
    read, peak = data["read_gb_s"], data["tflop_s"]
    knee = peak * 1e3 / read
    lo, hi = 0.5, 20_000.0
    axes.plot([lo, knee, hi], [lo * read / 1e3, peak, peak], color=GREY, linewidth=1.5)
    axes.text(3, 1.5 * 3 * read / 1e3, f"{read:,.0f} GB/s read", color=GREY, rotation=37)
    axes.text(1_200, peak * 1.2, f"{peak:,.0f} TFLOP/s", color=GREY)
    kinds: Sequence[tuple[str, str]] = (
        ("product, our gemv", BLUE),
        ("product, cuBLAS", ORANGE),
        ("attention, decode", "#2f855a"),
        ("attention, prefill", RED),
    )
    for kind, color in kinds:
        mine = [(x, y) for x, y, k in data["points"] if k == kind]
        axes.plot([x for x, _ in mine], [y for _, y in mine], "o", color=color, label=kind, markersize=4.5)
    axes.set(
        title=f"Kernels of the 1B shape on one {data['device'].removeprefix('NVIDIA ')}, and its two limits",
        xlabel="floating-point operations for each byte that must move (log scale)",
        ylabel="TFLOP/s (log scale)",
        xscale="log",
        yscale="log",
        xlim=(lo, hi),
        ylim=(0.02, 2_000),
    )
    axes.legend(loc="lower right")
