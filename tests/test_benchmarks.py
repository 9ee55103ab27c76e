"""The benchmark of the engine: what it refuses, what it prints, and that the README's table is its own."""

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

FOLDER = steps.ROOT / "benchmarks"


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / "cpu_engine.py", *arguments]
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
    assert f"Made by\n`{recorded['command']}`" in text
