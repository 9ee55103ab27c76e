"""What Engine(record_events=True) costs: the same load with and without it, turn by turn.

    python benchmarks/events.py                       # on a GPU if there is one: some 30 seconds on an H200
    python benchmarks/events.py --device cpu --json benchmarks/results/events_cpu.json

On a GPU the shape is that of Llama-3.2-1B with random bf16 weights, on a CPU the bundled small model.
Greedy, end tokens ignored. Each engine runs the load once to warm up; then both run it --rounds times, in
turn, because the speed of a shared machine drifts. The cost is that of the medians, and can come out below
zero: the spread says how much of it is noise.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import date
from typing import Any

from arguments import writable_file
from cuda_engine import SHAPE, commit, driver, greedy
from tiny_vllm import Engine, _core


def seconds(engine: Engine, requests: int, prompt: int, new: int) -> float:
    prompts = [[(7919 * i + 104729 * r) % 10_000 for i in range(prompt)] for r in range(requests)]
    start = time.perf_counter()
    engine.generate(prompts, greedy(new))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=writable_file, help="write the results there")
    parser.add_argument("--commit", default=None, help="what to call this version, when git is not there")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    on_gpu = args.device != "cpu" and not _core.cuda_devices()[1]
    options: dict[str, Any] = {"device": args.device, "enable_prefix_caching": False, "max_model_len": 512}
    if on_gpu:
        options |= {"load_format": "dummy", "kv_cache_memory_bytes": 8 << 30}
    model = SHAPE if on_gpu else None
    engines = {on: Engine(model, record_events=on, **options) for on in (False, True)}
    cases = [(1, 32, 128), (64, 128, 256), (256, 128, 256)] if on_gpu else [(1, 16, 32), (16, 16, 32)]
    rows = []
    for case in cases:
        for engine in engines.values():
            seconds(engine, *case)
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(args.rounds):
            for on, engine in engines.items():
                times[on].append(seconds(engine, *case))
        off, on_ = (statistics.median(times[on]) for on in (False, True))
        spread = (max(times[False]) - min(times[False])) / off
        requests, prompt, new = case
        row = {
            "case": f"{requests} x ({prompt} prompt + {new} new)",
            "without_s": off,
            "with_s": on_,
            "cost_percent": 100 * (on_ / off - 1),
            "spread_percent": 100 * spread,
        }
        rows.append(row)
        print(
            f"{row['case']:28} {off:8.4f} s without, {on_:8.4f} s with: {row['cost_percent']:+.2f} %, "
            f"where the runs without differ by {row['spread_percent']:.2f} %",
            flush=True,
        )
    if args.json:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "device": engines[True].info()["device"],
            "driver": driver() if on_gpu else None,
            "commit": args.commit or commit(),
            "date": date.today().isoformat(),
            "python": platform.python_version(),
            "rounds": args.rounds,
            "results": rows,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
