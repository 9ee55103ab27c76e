"""The README's examples, run. What they are shown to print is what they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import packaging_steps as steps

README = (steps.ROOT / "README.md").read_text(encoding="utf-8")


def block(before: str, kind: str = "") -> str:
    """The first fenced block of this kind after the text `before`."""
    found = re.search(rf"^```{kind}\n(.*?)^```$", README[README.index(before) :], re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


def output(*arguments: str, cwd: Path) -> str:
    """Standard output alone: where figures and progress go to standard error."""
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_command_prints_what_is_shown(bundled_folder: Path, tmp_path: Path) -> None:
    command = re.search(r'^bash run\.sh "(.*)"  +# goes on', README, re.MULTILINE)
    assert command
    text, figures = block("Then the first command streams:").rstrip("\n").rsplit("\n", 1)
    assert "tok/s" in figures
    assert output("-m", "tiny_vllm", "run", command[1], cwd=tmp_path) == text + "\n"


def test_the_python_example_prints_what_is_shown(bundled_folder: Path, tmp_path: Path) -> None:
    code = block("From Python", "python")
    assert output("-c", code, cwd=tmp_path) == block("From Python", "text")


def test_the_loop_prints_what_is_shown(bundled_folder: Path, tmp_path: Path) -> None:
    """It goes on with the engine of the example before it."""
    engine = "from tiny_vllm import Engine, SamplingParams\nengine = Engine()\n"
    code = block("are the loop that", "python")
    assert output("-c", engine + code, cwd=tmp_path) == block("are the loop that", "text")


def test_the_structured_example_prints_what_is_shown(bundled_folder: Path, tmp_path: Path) -> None:
    engine = "from tiny_vllm import Engine, SamplingParams\nengine = Engine()\n"
    code = block("An answer can be made to keep", "python")
    assert output("-c", engine + code, cwd=tmp_path) == block("An answer can be made to keep", "text")


def test_the_events_are_what_is_shown(bundled_folder: Path, tmp_path: Path) -> None:
    code = "from tiny_vllm import Engine, SamplingParams\n" + block("`engine.events()` says", "python")
    assert output("-c", code, cwd=tmp_path) == block("`engine.events()` says", "text")


def test_the_asynchronous_example_prints_what_is_shown(bundled_folder: Path, tmp_path: Path) -> None:
    code = block("takes `AsyncEngine`", "python")
    assert output("-c", code, cwd=tmp_path) == block("takes `AsyncEngine`", "text")


def test_every_flag_that_is_shown_exists() -> None:
    known = output("-m", "tiny_vllm", "run", "--help", cwd=steps.ROOT)
    commands = re.findall(r"^bash run\.sh (.*)$", README, re.MULTILINE)
    flags = {flag for command in commands for flag in re.findall(r"(?<!\S)--[a-z-]+", command)}
    assert {"--chat", "--min-p"} <= flags
    assert all(re.search(rf"^  {flag}\b|, {flag}\b", known, re.MULTILINE) for flag in flags)


def test_the_defaults_are_those_that_are_named(bundled_folder: Path) -> None:
    from tiny_vllm import Engine

    params = Engine().default_sampling_params()
    sentence = "vLLM's defaults, which are 16 tokens at temperature 1.0"
    assert sentence in README
    assert (params.max_tokens, params.temperature) == (16, 1.0)


def test_it_says_first_what_it_runs_on() -> None:
    assert README.index("It runs on the CPU, and on an NVIDIA GPU") < README.index("bash run.sh")


def test_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md"):
        page = steps.ROOT / name
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{name} links to {target}"
