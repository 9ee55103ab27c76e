"""Each CUDA kernel of a step alone, at the shape of Llama-3.2-1B, beside what this GPU allows.

    python benchmarks/kernels.py                       # some minutes, the first time with a build
    python benchmarks/kernels.py gemv attention        # only those with one of the words in their name
    python benchmarks/kernels.py --json benchmarks/results/cuda_kernels.json
    python benchmarks/kernels.py --report benchmarks/results/cuda_kernels.json --markdown    # runs nothing

The measuring is done by the program of benchmarks/cuda_kernels.cu, built into build/bench unless --program
names one. In the same run it measures how fast the GPU reads and copies 1 GiB, and a bf16 product of
8192 x 8192 x 8192 by cuBLAS.

GB/s are bytes that must move, by the formula of each kernel, a second. A kernel whose operations would take
longer than its bytes is compared with the product, every other one with the copy. Reading alone is faster
than copying, so a kernel that hardly writes can pass 100 %; and so can one whose inputs are in the L2 cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from arguments import writable_file
from tiny_vllm import _core

ROOT = Path(__file__).resolve().parent.parent
FIELDS = ("device", "driver", "toolkit", "commit", "date", "ceilings", "kernels")
COLUMNS = ("kernel", "time, us", "MB", "GB/s", "of the copy", "TFLOP/s", "of the product")


def build() -> Path:
    """build/bench/cuda_kernels, with the cmake and ninja of this Python's environment where it has them."""
    folder = ROOT / "build" / "bench"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    options = ["-DTINY_VLLM_BUILD_BENCHMARKS=ON", "-DTINY_VLLM_BUILD_PYTHON=OFF", "-DTINY_VLLM_CUDA=ON"]
    if "CUDAARCHS" not in os.environ:
        options.append("-DCMAKE_CUDA_ARCHITECTURES=native")
    print("building build/bench/cuda_kernels (some minutes the first time)", file=sys.stderr, flush=True)
    configure = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in ([*configure, *options], ["cmake", "--build", folder, "--target", "cuda_kernels"]):
        try:
            done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True)
        except FileNotFoundError:
            sys.exit(
                "kernels.py: error: cmake is missing; build.sh brings it, or --program names what is built"
            )
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}\nkernels.py: error: the build of cuda_kernels failed")
    return folder / "cuda_kernels"


def with_cublas() -> dict[str, str]:
    """The environment, in which the program also finds the cuBLAS of the nvidia-cublas package."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    folders = [str(p / sub / "lib") for p in packages for sub in ("cu13", "cublas")]
    before = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join([*([before] if before else []), *folders])}


def measure(program: Path, words: list[str], commit: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [str(program), str(file), f"--commit={commit}", *words]
        try:
            done = subprocess.run(command, stdout=sys.stderr, env=with_cublas())  # it says what it is at
        except OSError as error:
            sys.exit(f"kernels.py: error: {program} cannot be run: {error.strerror}")
        if done.returncode:
            why = _core.cuda_devices()[1]
            sys.exit(f"kernels.py: error: {program} failed{f' (no GPU: {why})' if why else ''}")
        try:
            report = read_report(file)
        except ValueError as error:
            sys.exit(f"kernels.py: error: {program} wrote no report, so it is not cuda_kernels: {error}")
    return {"command": shlex.join(["python", *sys.argv]), **report}


def read_report(file: Path) -> dict[str, Any]:
    """A report of cuda_kernels, with all that the heading and the table need.

    Raises:
        ValueError: it is none; says why.
    """
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(str(error.strerror)) from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    missing = [name for name in FIELDS if not isinstance(report, dict) or name not in report]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    try:
        heading(report)
        rows(report)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"ceilings or kernels are not as cuda_kernels writes them ({error!r})") from None
    return report


def commit() -> str:
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """COLUMNS for each kernel of a report. A column that says nothing of a kernel is –."""
    copy, peak = report["ceilings"]["copy_gb_s"], report["ceilings"]["gemm_tflop_s"]
    table: list[tuple[str, ...]] = []
    for kernel in report["kernels"]:
        gb_s, tflop_s = kernel["bytes"] / kernel["us"] / 1e3, kernel["flops"] / kernel["us"] / 1e6
        by_compute = kernel["flops"] / peak / 1e6 > kernel["bytes"] / copy / 1e3
        table.append(
            (
                kernel["name"],
                f"{kernel['us']:,.1f}",
                f"{kernel['bytes'] / 1e6:,.2f}",
                f"{gb_s:,.0f}",
                "–" if by_compute else f"{gb_s / copy:.0%}",
                f"{tflop_s:,.0f}" if by_compute else "–",
                f"{tflop_s / peak:.0%}" if by_compute else "–",
            )
        )
    return table


def heading(report: dict[str, Any]) -> str:
    c = report["ceilings"]
    return (
        f"{report['device']}, driver {report['driver']}, CUDA {report['toolkit']}, "
        f"commit {report['commit'][:12]}, {report['date']}: "
        f"{c['read_gb_s']:,.0f} GB/s read, {c['copy_gb_s']:,.0f} GB/s copied, "
        f"{c['gemm_tflop_s']:,.0f} TFLOP/s in a bf16 product of 8192 x 8192 x 8192"
    )


def plain(table: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in (COLUMNS, *table)) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in (COLUMNS, *table)
    )


def markdown(table: list[tuple[str, ...]]) -> str:
    rule = ("---", *["---:"] * (len(COLUMNS) - 1))
    return "\n".join(f"| {' | '.join(row)} |" for row in (COLUMNS, rule, *table))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only kernels with one of them in their name"
    )
    parser.add_argument("--program", type=Path, help="cuda_kernels, built already")
    parser.add_argument("--report", type=Path, help="show this recorded report instead of measuring")
    parser.add_argument("--json", type=writable_file, help="write the report there")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--commit", help="what to call this version, when git is not there")
    args = parser.parse_args()
    if args.report and (args.program or args.json or args.commit or args.words):
        parser.error("--report only shows what is recorded; it goes with --markdown alone")
    if args.report:
        try:
            report = read_report(args.report)
        except ValueError as error:
            parser.error(f"argument --report: '{args.report}' cannot be read: {error}")
    else:
        why_no_gpu = _core.cuda_devices()[1]
        if why_no_gpu and not args.program:
            sys.exit(f"no GPU: {why_no_gpu}")
        report = measure((args.program or build()).absolute(), args.words, args.commit or commit())
    # The program alone knows the names, so a wrong word is found when it is through.
    unknown = [w for w in args.words if not any(w in kernel["name"] for kernel in report["kernels"])]
    complaint = f"kernels.py: error: no kernel has {' or '.join(map(repr, unknown))} in its name"
    if not report["kernels"]:
        sys.exit(complaint if unknown else "kernels.py: error: the report has no kernels")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(heading(report))
    print()
    print((markdown if args.markdown else plain)(rows(report)))
    if unknown:
        sys.exit(complaint)


if __name__ == "__main__":
    main()
