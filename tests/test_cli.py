"""The command line: answers on standard output, figures and errors on standard error, and exit codes."""

from __future__ import annotations

import io
import re
import sys
import warnings
from dataclasses import fields
from pathlib import Path

import fixtures
import numpy as np
import pytest
from helpers import greedy, open_engine
from tiny_vllm import EngineConfig, cli

MODEL_OPTIONS = ["--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "4194304"]


class Run:
    """`tiny-vllm ARGUMENTS` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() replaces it
        monkeypatch.setenv("COLUMNS", "200")

    def __call__(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        self.monkeypatch.setattr(sys, "argv", ["tiny-vllm", *arguments])
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            cli.main()
            code: object = 0
        except SystemExit as end:
            code = end.code
        out, err = self.capsys.readouterr()
        return int(str(code or 0)), out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


def test_one_prompt(run: Run, rand_folder: Path) -> None:
    code, out, err = run("run", "Hello", "--model", str(rand_folder), "--max-tokens", "6", *MODEL_OPTIONS)
    answer = open_engine(rand_folder).generate("Hello", greedy(6))[0].outputs[0].text
    assert (code, out) == (0, f"Hello{answer}\n")
    assert re.search(r"5 prompt \+ 6 generated tokens, .* tok/s, .* GB/s", err)


def test_several_prompts(run: Run, rand_folder: Path, tmp_path: Path) -> None:
    """From the arguments, then from a file or standard input, one a line."""
    answers = open_engine(rand_folder).generate(["a", "b c", "é"], greedy(3))
    expected = "".join(f"--- {o.prompt}\n{o.outputs[0].text}\n" for o in answers)
    (tmp_path / "prompts.txt").write_text("b c\n\n  \né\n", encoding="utf-8")
    common = ["--model", str(rand_folder), "--max-tokens", "3", *MODEL_OPTIONS]
    for arguments, stdin in (
        (["a", "b c", "é"], ""),
        (["a", "--file", str(tmp_path / "prompts.txt")], ""),
        (["a", "-f", "-"], "b c\né"),
    ):
        code, out, err = run("run", *arguments, *common, stdin=stdin)
        assert (code, out) == (0, expected)
        assert "9 generated tokens, 3 requests" in err


def test_chat(run: Run, tmp_path: Path) -> None:
    fixtures.write_fixed(tmp_path, [0.0] * 65 + [1.0] + [0.0] * 200)
    fixtures.write_byte_tokenizer(tmp_path, chat_template="{{ messages[0].content }}?")
    common = ["--model", str(tmp_path), "--max-tokens", "3", "--chat", *MODEL_OPTIONS]
    assert run("run", "hi", *common)[:2] == (0, "AAA\n")  # the answer alone
    code, out, err = run("run", "hi", "you", *common)
    assert (code, out) == (0, "--- hi\nAAA\n--- you\nAAA\n")
    assert "7 prompt + 6 generated tokens" in err


def test_a_seed_repeats(run: Run, rand_folder: Path) -> None:
    common = ["run", "x", "--model", str(rand_folder), "--temperature", "1", "--top-k", "50", *MODEL_OPTIONS]
    first = run(*common, "--sampling-seed", "3")
    assert first[:2] == run(*common, "--sampling-seed", "3")[:2]
    assert first[:2] != run(*common, "--sampling-seed", "4")[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "0"], r"InvalidRequestError: block_size must be in \[1, 65536\], got 0"),
        (["--temperature", "-1"], "InvalidRequestError: temperature must be"),
        (["--max-tokens", "0"], "InvalidRequestError: max_tokens must be"),
        (["--max-model-len", "5"], "InvalidRequestError: prompt has 5 tokens"),
        (["--chat"], "InvalidRequestError: .* has no chat template"),
        (["--kv-cache-memory-bytes", str(2**60)], "OutOfMemoryError: wanted"),
        (["--model", "./not/there"], "ModelLoadError: .*not/there"),
    ],
)
def test_errors_are_one_sentence(run: Run, rand_folder: Path, arguments: list[str], message: str) -> None:
    code, out, err = run("run", "Hello", "--model", str(rand_folder), *MODEL_OPTIONS, *arguments)
    assert (code, out) == (1, "")
    assert re.search(message, err)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "give a prompt"),
        (["run", "x", "--scheduler", "orca"], "orca"),
        (["run", "x", "--top-q", "1"], "--top-q"),
        (["run", "--file", "/not/there.txt"], "/not/there.txt cannot be read"),
        (["fly"], "fly"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_an_answer_that_ends_in_an_error(run: Run, tmp_path: Path) -> None:
    config = fixtures.llama_config()
    tensors = fixtures.random_tensors(config)
    tensors["model.embed_tokens.weight"][ord("x")] = np.nan
    fixtures.write_model(tmp_path, config, tensors)
    fixtures.write_byte_tokenizer(tmp_path)
    code, out, err = run("run", "x", "--model", str(tmp_path), *MODEL_OPTIONS)
    assert (code, out) == (1, "x\n")
    assert "NaN" in err
    code, out, err = run("run", "x", "y", "--max-tokens", "1", "--model", str(tmp_path), *MODEL_OPTIONS)
    assert code == 0
    assert "NaN" in out.splitlines()[1]


def test_every_engine_option_is_a_flag(run: Run) -> None:
    code, out, _ = run("run", "--help")
    assert code == 0
    for f in fields(EngineConfig):
        assert f"--{f.name.replace('_', '-')}" in out


def test_info(run: Run) -> None:
    code, out, _ = run("info")
    assert code == 0
    for name in ("version", "compiler", "instruction_sets", "cuda_reason"):
        assert re.search(f"^{name}: ", out, re.MULTILINE)
