"""Runs every test that needs a GPU and writes a report. What full_test.sh --gpu calls.

    python scripts/gpu_tests.py CUDA_TESTS [--report FILE] [--commit HASH]

CUDA_TESTS: the program tiny_vllm_cuda_tests of a build. Nothing is left out silently: a missing tool fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tiny_vllm import _core

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
# With --device cuda their engines and ops are on the GPU; what is about the CPU alone is marked cpu_only.
TEST_FILES = (
    "test_ops.py", "test_ops_attention.py", "test_sampling_ways.py", "test_sampling.py",
    "test_sampling_mixed.py", "test_logit_edits.py", "test_engine.py", "test_tiny_golden.py",
    "test_golden.py", "test_bug_cases.py", "test_bug_cases_text.py", "test_bug_cases_scheduling.py",
    "test_cuda.py", "test_cuda_families.py", "test_text_params.py", "test_structured_outputs.py",
    "test_events.py", "test_priority.py", "test_sampling_reference.py", "test_any_mix.py",
    "test_vllm_parameters.py",
)  # fmt: skip


def run(command: list[str], **environment: str) -> tuple[int, str]:
    print("$", " ".join(command), flush=True)
    done = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
    )  # fmt: skip
    return done.returncode, done.stdout


def step(name: str, command: list[str], counts: str, **environment: str) -> dict[str, Any]:
    """Runs a command; the last line that matches `counts` says what it did."""
    start = time.time()
    code, output = run(command, **environment)
    found = [line for line in output.splitlines() if re.search(counts, line)]
    result = {"name": name, "passed": code == 0 and bool(found), "seconds": round(time.time() - start, 1)}
    result["counts"] = found[-1].strip(" =") if found else ""
    print(f"{'passed' if result['passed'] else 'FAILED'}: {name}: {result['counts']}", flush=True)
    if not result["passed"]:
        print(output[:4000], "\n...\n", output[-4000:], flush=True)
    return result


def machine() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    gpu = _core.cuda_devices()[0][0]
    return {
        "device": gpu.name,
        "compute_capability": gpu.compute_capability,
        "driver": driver,
        "toolkit": _core.build_info()["cuda_version"],
        "architectures": _core.build_info()["cuda_architectures"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cuda_tests", type=Path)
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "gpu_tests.json")
    parser.add_argument("--commit", help="what to call this version, where git is not there")
    parser.add_argument("--jobs", default="4", help="pytest processes that share the GPU")
    args = parser.parse_args()
    reason = _core.cuda_devices()[1]
    if reason:
        sys.exit(f"No GPU test was run: {reason}.")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("No GPU test was run: compute-sanitizer is missing; it comes with the CUDA toolkit.")

    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    report: dict[str, Any] = {
        **machine(),
        "commit": args.commit or git.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "steps": [],
    }
    args.report.parent.mkdir(parents=True, exist_ok=True)
    scenario = [sys.executable, "tests/cuda_scenario.py"]
    check = [sanitizer, "--error-exitcode", "1", "--print-limit", "5"]
    pytest = [sys.executable, "-m", "pytest", "-q", "--device", "cuda", "-n", args.jobs]
    for name, command, counts in (
        ("large sizes", [str(args.cuda_tests)], r"\d+ passed"),
        ("pytest", [*pytest, *(f"tests/{file}" for file in TEST_FILES)], r"\d+ passed"),
        *(
            (
                tool,
                [*check, "--tool", tool, *scenario],
                r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards",
            )
            for tool in SANITIZERS
        ),
    ):
        report["steps"].append(step(name, command, counts, TINY_VLLM_FULL_TEST="1"))
        args.report.write_text(
            json.dumps(report, indent=2) + "\n"
        )  # after each step: a later one may be cut off
    print(f"the report is in {args.report}")
    sys.exit(0 if all(s["passed"] for s in report["steps"]) else 1)


if __name__ == "__main__":
    main()
