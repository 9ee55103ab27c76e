"""The benchmarks: what they refuse, what they print, and that the README's table is their own."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import fixtures
import packaging_steps as steps
import pytest
from tiny_vllm import _core

FOLDER = steps.ROOT / "benchmarks"
SHAPE = FOLDER / "llama-3.2-1b-shape/config.json"


def run(*arguments: object, cwd: Path, script: str = "cpu_engine.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / script, *arguments]
    return subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)


def engines_of_table(text: str) -> list[str]:
    """The first column of the tables whose head begins with `engine`."""
    tables = re.findall(r"^\| engine .*\n\| --- .*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert tables
    return [row.split("|")[1].strip() for table in tables for row in table.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rounds", "0"], "argument --rounds: must be a whole number, 1 or more; got '0'"),
        (["--rounds", "many"], "argument --rounds: must be a whole number, 1 or more; got 'many'"),
        (["--threads", "0"], "argument --threads: must be a whole number, 1 or more; got '0'"),
        (["--peers", "llama.cpp,foo"], "argument --peers: no engine is called 'foo'; there are: llama.cpp, "),
        (["--json", "/nowhere/out.json"], "argument --json: '/nowhere/out.json' cannot be written"),
        (["--model", "/nowhere"], "/nowhere: no such folder or file"),
    ],
    ids=str,
)
def test_wrong_arguments_are_one_sentence(tmp_path: Path, arguments: list[str], expected: str) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"cpu_engine.py: error: {expected}")
    assert "Traceback" not in done.stderr


def test_it_says_where_it_is_and_prints_a_table(tmp_path: Path) -> None:
    folder = fixtures.write_rand(tmp_path / "model")
    options = ["--model", folder, "--dummy", "--rounds", 2, "--threads", 1, "--json", tmp_path / "out.json"]
    done = run(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert engines_of_table(done.stdout) == ["tiny-vllm bf16"]
    assert done.stderr.splitlines() == [
        "loading the model into tiny-vllm bf16",
        "warm-up: tiny-vllm bf16",
        *(f"round {i} of 2, batch of {size}: tiny-vllm bf16" for i in (1, 2) for size in (1, 8)),
    ]
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["command"] == shlex.join(["python", str(FOLDER / "cpu_engine.py"), *map(str, options)])
    results = report["results"]
    assert [len(runs) for runs in results["tiny-vllm bf16"].values()] == [2, 2]


def test_the_readme_shows_the_recorded_engines() -> None:
    recorded = json.loads((FOLDER / "results/cpu_engine.json").read_text())
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert engines_of_table(text) == list(recorded["results"])
    assert f"Made by\n`.venv/bin/{recorded['command']}`" in text


# A GPU with 4,000 GB/s of copy and 800 TFLOP/s: one kernel that is bound by memory, and one by arithmetic.
KERNELS = {
    "device": "Some GPU", "driver": "580.1", "driver_cuda_version": 13000, "toolkit": "13.0.88",
    "architectures": "90a", "commit": "0123456789abcdef", "date": "2026-01-31",
    "ceilings": {"read_gb_s": 4400.0, "copy_gb_s": 4000.0, "gemm_tflop_s": 800.0},
    "kernels": [
        {"name": "gemv qkv m=1", "us": 5.0, "bytes": 12_600_000, "flops": 12_600_000},
        {"name": "cublas qkv m=8192", "us": 1234.5, "bytes": 96_000_000, "flops": 493_800_000_000},
    ],
}  # fmt: skip
HEADING = (
    "Some GPU, driver 580.1, CUDA 13.0.88, commit 0123456789ab, 2026-01-31: 4,400 GB/s read, "
    "4,000 GB/s copied, 800 TFLOP/s in a bf16 product of 8192 x 8192 x 8192\n\n"
)
CELLS = [
    ["kernel", "time, us", "MB", "GB/s", "of the copy", "TFLOP/s", "of the product"],
    ["gemv qkv m=1", "5.0", "12.60", "2,520", "63%", "–", "–"],
    ["cublas qkv m=8192", "1,234.5", "96.00", "78", "–", "400", "50%"],
]


def test_kernels_are_compared_with_what_bounds_them(tmp_path: Path) -> None:
    """A recorded report as a table, for a terminal and for a README."""
    (tmp_path / "report.json").write_text(json.dumps(KERNELS))
    done = run("--report", "report.json", cwd=tmp_path, script="kernels.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(HEADING)
    lines = done.stdout.splitlines()[2:]
    assert [re.split("  +", line) for line in lines] == CELLS
    assert len({len(line) for line in lines}) == 1
    done = run("--report", "report.json", "--markdown", cwd=tmp_path, script="kernels.py")
    assert done.stdout.startswith(HEADING)
    head, rule, *rest = done.stdout.splitlines()[2:]
    assert [line.strip("| ").split(" | ") for line in (head, *rest)] == CELLS
    assert rule == "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"


def test_the_recorded_report_is_one() -> None:
    done = run("--report", FOLDER / "results/cuda_kernels.json", cwd=steps.ROOT, script="kernels.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) > 20


def program_that_reports(folder: Path, report: dict[str, object]) -> Path:
    (folder / "made.json").write_text(json.dumps(report))
    program = folder / "program"
    program.write_text(f'#!/bin/sh\ncp "{folder / "made.json"}" "$1"; shift; echo "$@"\n')
    program.chmod(0o755)
    return program


def test_words_that_no_kernel_has_are_named(tmp_path: Path) -> None:
    """Nothing is written when no kernel is left; what was measured is shown all the same."""
    program = program_that_reports(tmp_path, KERNELS)
    options = ["--program", program, "--json", "out.json"]
    done = run("gemv", "gemmv", *options, cwd=tmp_path, script="kernels.py")
    assert done.returncode == 1
    assert done.stdout.startswith(HEADING)
    assert done.stderr.splitlines()[-1] == "kernels.py: error: no kernel has 'gemmv' in its name"
    (tmp_path / "out.json").unlink()
    program_that_reports(tmp_path, {**KERNELS, "kernels": []})
    done = run("gemmv", "softmax", *options, cwd=tmp_path, script="kernels.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "kernels.py: error: no kernel has 'gemmv' or 'softmax' in its name"
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ceilings": None}, "ceilings or kernels are not as cuda_kernels writes them"),
        ({"kernels": [{"name": "gemv"}]}, "ceilings or kernels are not as cuda_kernels writes them"),
    ],
    ids=str,
)
def test_a_report_that_is_none(tmp_path: Path, change: dict[str, object], why: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(KERNELS | change))
    done = run("--report", "a.json", cwd=tmp_path, script="kernels.py")
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"kernels.py: error: argument --report: 'a.json' cannot be read: {why}")


@pytest.mark.skipif(not _core.cuda_devices()[1], reason="there is a GPU here")
@pytest.mark.parametrize("script", ["kernels.py", "cuda_engine.py", "course.py"])
def test_without_a_gpu_nothing_is_built(tmp_path: Path, script: str) -> None:
    done = run(cwd=tmp_path, script=script)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"no GPU: {_core.cuda_devices()[1]}\n"


@pytest.mark.parametrize(
    "script", ["cpu_engine.py", "cpu_kernels.py", "cuda_engine.py", "kernels.py", "course.py"]
)
@pytest.mark.parametrize("where", [".", "not/there.json"])
def test_where_figures_go_is_looked_at_first(tmp_path: Path, script: str, where: str) -> None:
    done = run("--json", where, cwd=tmp_path, script=script)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"{script}: error: argument --json: '{where}' cannot be written"


def test_the_shape_of_the_gpu_benchmarks_is_llama_3_2_1b() -> None:
    """`tiny-vllm bench` and cuda_engine.py read it; it runs without a tokenizer and without weights."""
    config = _core.parse_config(SHAPE.read_text(), str(SHAPE)).as_dict()
    sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size")
    assert [config[name] for name in sizes] == [2048, 8192, 16, 32, 8, 128256]
    assert config["tie_word_embeddings"]


def test_kernels_runs_its_program(tmp_path: Path) -> None:
    """Given words and a commit, and says where the report came from."""
    program = program_that_reports(tmp_path, KERNELS)
    options = ["gemv", "cublas", "--program", program, "--json", "out.json", "--commit", "abc"]
    done = run(*options, cwd=tmp_path, script="kernels.py")
    assert (done.returncode, done.stderr) == (0, "--commit=abc gemv cublas\n")
    assert done.stdout.startswith(HEADING)
    written = json.loads((tmp_path / "out.json").read_text())
    assert written == {
        "command": shlex.join(["python", str(FOLDER / "kernels.py"), *map(str, options)]),
        **KERNELS,
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--report", "a.json", "gemv"],
            "--report only shows what is recorded; it goes with --markdown alone",
        ),
        (["--report", "a.json"], "argument --report: 'a.json' cannot be read: No such file or directory"),
        (["--report", "/dev/null"], "argument --report: '/dev/null' cannot be read: it is not JSON: "),
        (["--report", SHAPE], f"argument --report: '{SHAPE}' cannot be read: it has no device, driver, "),
        (["--json", "/nowhere/out.json"], "argument --json: '/nowhere/out.json' cannot be written"),
        (["--program", "/nowhere/cuda_kernels"], "/nowhere/cuda_kernels cannot be run: No such file"),
        (["--program", "/bin/false"], "/bin/false failed"),
        (["--program", "/bin/true"], "/bin/true wrote no report, so it is not cuda_kernels: No such file"),
    ],
    ids=str,
)
def test_kernels_says_in_one_sentence_what_is_wrong(
    tmp_path: Path, arguments: list[object], expected: str
) -> None:
    done = run(*arguments, cwd=tmp_path, script="kernels.py")
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"kernels.py: error: {expected}")
    assert "Traceback" not in done.stderr
