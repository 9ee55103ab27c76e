"""Speed of the whole engine on a GPU, at the shape of Llama-3.2-1B-Instruct with random bf16 weights.

    python benchmarks/cuda_engine.py                          # some 30 seconds on an H200
    python benchmarks/cuda_engine.py --rounds 5 --json benchmarks/results/cuda_engine.json

Greedy, end tokens ignored, no prefix cache. Each case runs once to warm up and then --rounds times; the
table shows the median and the spread. Times are those of a caller of Engine.generate() with token ids:
scheduling, sampling and Python included.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arguments import writable_file
from tiny_vllm import Engine, SamplingParams, _core

SHAPE = Path(__file__).resolve().parent / "llama-3.2-1b-shape"  # a config.json alone


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def prompts(rng: random.Random, lengths: list[int]) -> list[list[int]]:
    return [[rng.randrange(10_000) for _ in range(n)] for n in lengths]


class Bench:
    def __init__(self, engine: Engine, rounds: int) -> None:
        self.engine = engine
        self.rounds = rounds
        self.rows: list[dict[str, Any]] = []

    def measure(self, name: str, unit: str, run: Callable[[], float]) -> None:
        run()
        values = sorted(run() for _ in range(self.rounds))
        row = {
            "case": name,
            "unit": unit,
            "median": statistics.median(values),
            "min": values[0],
            "max": values[-1],
        }
        self.rows.append(row)
        print(
            f"{name:58} {row['median']:12,.3f} {unit:10} {row['min']:12,.3f} to {row['max']:,.3f}", flush=True
        )

    def seconds(self, batch: list[list[int]], params: Any) -> float:
        start = time.perf_counter()
        outputs = self.engine.generate(batch, params)
        took = time.perf_counter() - start
        wanted = params if isinstance(params, list) else [params] * len(batch)
        assert all(len(o.outputs[0].token_ids) == p.max_tokens for o, p in zip(outputs, wanted, strict=True))
        return took

    def decode(self, requests: int, prompt: int, new: int) -> float:
        """Seconds for each token but the first: a whole run, less one that ends with the first tokens."""
        batch = prompts(random.Random(requests), [prompt] * requests)
        first = self.seconds(batch, greedy(1))
        return (self.seconds(batch, greedy(new)) - first) / (requests * (new - 1))

    def run(self) -> None:
        rng = random.Random(0)
        self.measure(
            "batch 1, 32-token prompt, 128 new: per decoded token",
            "ms",
            lambda: 1e3 * self.decode(1, 32, 128),
        )
        for batch in (8, 32, 64, 256):
            self.measure(
                f"batch {batch}, 128-token prompts, 256 new: decode alone",
                "tok/s",
                lambda batch=batch: 1 / self.decode(batch, 128, 256),  # type: ignore[misc]
            )
        whole = prompts(rng, [128] * 256)
        self.measure(
            "batch 256, 128-token prompts, 256 new: whole run",
            "tok/s",
            lambda: 256 * 256 / self.seconds(whole, greedy(256)),
        )
        mixed_rng = random.Random(0)
        mixed = [
            [mixed_rng.randint(0, 10_000) for _ in range(mixed_rng.randint(100, 1024))] for _ in range(256)
        ]
        lengths = [mixed_rng.randint(100, 1024) for _ in range(256)]
        self.measure(
            "256 mixed requests, 100 to 1024 tokens in and out",
            "tok/s",
            lambda: sum(lengths) / self.seconds(mixed, [greedy(n) for n in lengths]),
        )
        for length in (512, 2048, 8192):
            ids = prompts(rng, [length])
            self.measure(
                f"prefill of one {length:,}-token prompt",
                "ms",
                lambda ids=ids: 1e3 * self.seconds(ids, greedy(1)),  # type: ignore[misc]
            )


def commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=writable_file, help="write the results there")
    parser.add_argument("--commit", default=None, help="what to call this version, when git is not there")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    devices, why_none = _core.cuda_devices()
    if why_none:
        sys.exit(f"no GPU: {why_none}")

    engine = Engine(
        SHAPE, device="cuda", load_format="dummy", max_model_len=9216, max_num_seqs=256,
        max_num_batched_tokens=8192, enable_prefix_caching=False,
    )  # fmt: skip
    print(engine.info()["device"])
    bench = Bench(engine, args.rounds)
    bench.run()
    if args.json:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "device": devices[0].name,
            "driver": driver(),
            "toolkit": _core.build_info()["cuda_version"],
            "architectures": _core.build_info()["cuda_architectures"],
            "commit": args.commit or commit(),
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "rounds": args.rounds,
            "model": "Llama-3.2-1B-Instruct shape, random bf16 weights",
            "results": bench.rows,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
