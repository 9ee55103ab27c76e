"""Each kernel of the CPU backend alone, beside what this machine could do at best.

    python benchmarks/cpu_kernels.py                           # the shapes of SmolLM2-135M and Llama-3.2-1B
    python benchmarks/cpu_kernels.py --isa avx2 --threads 1
    python benchmarks/cpu_kernels.py --json out.json

A kernel that reads much and computes little (M = 1) is limited by memory: GB/s counts the weights, and
its ceiling is a plain read of memory with the same threads, measured just before. A kernel that computes
much (M = 512) is limited by arithmetic: its ceiling is the best GFLOP/s seen on a matmul whose operands
stay in the caches.

Weights are taken from a large pool, another part each time, as a forward pass does. Every figure is the
median of the rounds, and each kernel is compared with the reference once before it is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from arguments import writable_file
from tiny_vllm import _core, ops

POOL_BYTES = 1 << 29
# name, N, K of the matmuls of one layer, and of the head
MATMULS = {
    "SmolLM2-135M": [("qkv", 960, 576), ("o", 576, 576), ("gate_up", 3072, 576), ("down", 576, 1536),
                     ("lm_head", 49152, 576)],
    "Llama-3.2-1B": [("qkv", 3072, 2048), ("o", 2048, 2048), ("gate_up", 16384, 2048), ("down", 2048, 8192)],
}  # fmt: skip
ATTENTION = {"SmolLM2-135M": (9, 3, 64), "Llama-3.2-1B": (32, 8, 64)}  # H, Hk, Dh


def random_bits(shape: tuple[int, ...], seed: int = 0) -> Any:
    """bfloat16 numbers of size 2^-6 to 2^2, as bits: quick to make, and nothing overflows."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 16, shape, np.uint16)
    return (bits & 0x81FF) | 0x3C00


def check(isa: str) -> None:
    """The kernels against the reference, on small inputs."""
    x, w = (random_bits(s).view(ops.bfloat16) for s in ((33, 200), (70, 200)))
    qkv, kv = (random_bits(s).view(ops.bfloat16) for s in ((40, 10 * 64), (9, 2, 16, 64)))
    step: dict[str, Any] = {"block_tables": [[0, 3, 1, 8]], "context_len": [60], "query_start": [0, 40]}
    for f in (
        lambda i: ops.matmul(x, w, isa=i),
        lambda i: ops.rms_norm(x, w[0], isa=i),
        lambda i: ops.act_mul(x, isa=i),
        lambda i: ops.paged_attention(qkv, kv, kv, num_heads=6, isa=i, **step),
    ):
        got, want = f(isa).astype(np.float64), f("reference").astype(np.float64)
        if not np.allclose(got, want, rtol=2**-6, atol=1e-2 * np.abs(want).max()):
            raise SystemExit(f"{isa} and the reference disagree: nothing to time")


class Timer:
    """Calls a function for a tenth of a second in all, in `rounds` parts; the median of their times."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def seconds(self, call: Callable[[int], None], least: float = 0.1) -> float:
        call(0)
        times, i = [], 1
        for _ in range(self.rounds):
            start, calls = time.perf_counter(), 0
            while time.perf_counter() - start < least / self.rounds or calls == 0:
                call(i)
                i, calls = i + 1, calls + 1
            times.append((time.perf_counter() - start) / calls)
        return statistics.median(times)


def matmuls(engine: _core.Ops, timer: Timer, threads: int, rows: list[dict[str, Any]]) -> None:
    pool = engine.array(random_bits((POOL_BYTES // 2,)))

    def matmul_rate(m: int, n: int, k: int, copies: int) -> float:
        x, out = engine.array(random_bits((m, k), 1)), engine.empty([m, n], "bfloat16")
        weights = [pool.view(i * n * k, [n, k]) for i in range(copies)]
        return timer.seconds(lambda i: engine.matmul(x, weights[i % copies], None, out))

    peak = max(2 * m * 512 * 512 / matmul_rate(m, 512, 512, 1) for m in (128, 256, 512)) / 1e9
    print(f"arithmetic: {peak:.0f} GFLOP/s on operands in the caches")
    for model, shapes in MATMULS.items():
        for name, n, k in shapes:
            copies = max(1, min(400, POOL_BYTES // (2 * n * k)))
            for m in (1, 8, 128, 512):
                if m > 8 and n > 20_000:
                    continue  # logits are wanted for few rows
                read = _core.measure_read_bandwidth(threads, POOL_BYTES // 2) if m <= 8 else 0.0
                t = matmul_rate(m, n, k, copies)
                row: dict[str, Any] = {
                    "model": model,
                    "op": f"matmul {name} ({n}, {k})",
                    "rows": m,
                    "us": t * 1e6,
                }
                row |= {"gb_s": 2 * n * k / t / 1e9, "gflop_s": 2 * m * n * k / t / 1e9}
                row["of_ceiling"] = row["gb_s"] / read if m <= 8 else row["gflop_s"] / peak
                row["ceiling"] = f"{read:.1f} GB/s" if m <= 8 else f"{peak:.0f} GFLOP/s"
                show(row, rows)


def attention(engine: _core.Ops, timer: Timer, rows: list[dict[str, Any]]) -> None:
    for model, shape in ATTENTION.items():
        for requests, new, context in [(1, 1, 512), (1, 1, 4096), (8, 1, 512), (1, 512, 512), (1, 512, 2048)]:
            show({"model": model, **attention_case(engine, timer, shape, requests, new, context)}, rows)


def attention_case(
    engine: _core.Ops, timer: Timer, shape: tuple[int, int, int], requests: int, new: int, context: int
) -> dict[str, Any]:
    (heads, kv_heads, dim), block = shape, 16
    blocks, tokens = context // block, requests * new
    tables = np.random.default_rng(0).permutation(requests * blocks).reshape(requests, blocks)
    keys, values = (engine.array(random_bits((requests * blocks, kv_heads, block, dim), s)) for s in (1, 2))
    qkv = engine.array(random_bits((tokens, (heads + 2 * kv_heads) * dim), 3))
    out = engine.empty([tokens, heads * dim], "bfloat16")
    batch = _core.OpsBatch(
        query_start=np.arange(requests + 1) * new, context_len=np.full(requests, context),
        block_tables=tables, slot_mapping=np.zeros(tokens), cos_sin=np.zeros(0), num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, block_size=block, scale=dim**-0.5,
    )  # fmt: skip
    t = timer.seconds(lambda _: engine.paged_attention(qkv, batch, keys, values, out))
    pairs = requests * sum(range(context - new + 1, context + 1))
    return {
        "op": f"attention, context {context}",
        "rows": tokens,
        "us": t * 1e6,
        "gb_s": 4 * requests * context * kv_heads * dim / t / 1e9,
        "gflop_s": 4 * pairs * heads * dim / t / 1e9,
    }


def elementwise(engine: _core.Ops, timer: Timer, m: int, rows: list[dict[str, Any]]) -> None:
    x, out = (engine.array(random_bits((m, 576), s)) for s in (1, 2))
    weight = engine.array(random_bits((576,)))
    gate_up, gated = engine.array(random_bits((m, 3072))), engine.empty([m, 1536], "bfloat16")
    for op, moved, call in (
        ("rms_norm", 4 * m * 576, lambda _: engine.rms_norm(x, weight, 1e-5, out)),
        ("act_mul silu", 6 * m * 1536, lambda _: engine.act_mul(gate_up, "silu", gated)),
    ):
        t = timer.seconds(call)
        show({"model": "SmolLM2-135M", "op": op, "rows": m, "us": t * 1e6, "gb_s": moved / t / 1e9}, rows)


def show(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    rows.append(row)
    rate = f"{row['gb_s']:7.1f} GB/s" + (f" {row['gflop_s']:7.0f} GFLOP/s" if "gflop_s" in row else "")
    share = f"  {row['of_ceiling']:4.0%} of {row['ceiling']}" if "ceiling" in row else ""
    print(
        f"{row['model']:13} {row['op']:27} {row['rows']:4} rows {row['us']:9.1f} us {rate}{share}", flush=True
    )


def commit() -> str:
    call = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(call, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=0, help="0: all CPUs of this process")
    parser.add_argument("--isa", default="auto", help=f"auto, {', '.join(ops.available_isas())}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=writable_file, help="write all figures here")
    args = parser.parse_args()

    check(args.isa)
    engine = _core.Ops("cpu", args.threads, args.isa)
    print(f"{engine.description}; commit {commit()}; median of {args.rounds} rounds")
    print(f"memory: {_core.measure_read_bandwidth(args.threads, POOL_BYTES):.1f} GB/s")
    rows: list[dict[str, Any]] = []
    timer = Timer(args.rounds)
    matmuls(engine, timer, args.threads, rows)
    attention(engine, timer, rows)
    for m in (1, 512):
        elementwise(engine, timer, m, rows)
    if args.json:
        report = {
            "command": "python benchmarks/cpu_kernels.py",
            "commit": commit(),
            "device": engine.description,
            "processor": processor(),
            "rows": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
