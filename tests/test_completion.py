"""What the tab key of a shell offers, and the script that asks for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from helpers import Run, python_process
from tiny_vllm.cli.options import begin_with_bundled

MAIN = "sys.argv = ['tiny-vllm', *ARGUMENTS]\nfrom tiny_vllm.cli import main\nmain()"


def tiny_vllm(*arguments: str, **environment: str) -> str:
    """Standard output of another process: completion ends the one it runs in, and leaves variables behind."""
    done = subprocess.run(
        python_process(MAIN.replace("ARGUMENTS", repr(list(arguments)))),
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def offered(line: str) -> list[str]:
    """What bash would offer at the end of the line."""
    words = line.split(" ")
    out = tiny_vllm(_TINY_VLLM_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    return out.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tiny-vllm b", ["bench"]),
        ("tiny-vllm c", ["chat", "convert"]),
        ("tiny-vllm bench d", ["decode-1", "decode-64"]),
        ("tiny-vllm run --device c", ["cpu", "cuda"]),
        ("tiny-vllm chat --sy", ["--system"]),
        ("tiny-vllm convert --", ["--force", "--help"]),
        ("tiny-vllm convert bund", ["bundled"]),
        ("tiny-vllm chat --model bund", ["bundled"]),
    ],
)
def test_what_is_offered(line: str, expected: list[str]) -> None:
    assert offered(line) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell: str) -> None:
    script = tiny_vllm("--show-completion", shell)
    assert f"_TINY_VLLM_COMPLETE=complete_{shell}" in script
    assert "tiny-vllm" in script


def test_bash_takes_the_script(tmp_path: Path) -> None:
    """As when a person presses the tab key after `tiny-vllm b`."""
    program = tmp_path / "tiny-vllm"
    arguments = " ".join(f"'{part}'" for part in python_process("")[:1])
    (tmp_path / "main.py").write_text(python_process(MAIN.replace("ARGUMENTS", "sys.argv[1:]"))[-1])
    program.write_text(f'#!/bin/sh\nexec {arguments} {tmp_path}/main.py "$@"\n')
    program.chmod(0o755)
    (tmp_path / "completion").write_text(tiny_vllm("--show-completion", "bash"))
    press = (
        f"source {tmp_path}/completion; COMP_WORDS=({program} b); COMP_CWORD=1; "
        f'_tiny_vllm_completion {program}; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", press], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("bench\n", "")


def test_installing_for_a_shell(tmp_path: Path) -> None:
    out = tiny_vllm("--install-completion", "bash", HOME=str(tmp_path))
    assert out.startswith(f"bash completion installed in {tmp_path}/.bash_completions/tiny-vllm.sh; ")
    assert "tiny-vllm.sh" in (tmp_path / ".bashrc").read_text()
    assert "complete_bash" in (tmp_path / ".bash_completions" / "tiny-vllm.sh").read_text()
    assert tiny_vllm("--install-completion=bash", HOME=str(tmp_path)) == out


@pytest.mark.parametrize("option", ["--install-completion", "--show-completion"])
@pytest.mark.parametrize("shell", ["tcsh", "nosuch", ""])
def test_a_shell_that_is_not_known(
    run: Run, option: str, shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for arguments in ([option, shell], [f"{option}={shell}"]):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert err.endswith(f"{option}: {shell!r} is not one of bash, zsh, fish, powershell, pwsh\n")
        assert err.startswith(f"Usage: tiny-vllm {option}")
    assert list(tmp_path.iterdir()) == []


def test_files_that_begin_alike_are_offered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bunny.gguf").write_text("")
    assert begin_with_bundled("bun") == ["bundled", "bunny.gguf"]
    assert begin_with_bundled("bund") == ["bundled"]
    assert begin_with_bundled("") == begin_with_bundled("bunn") == []  # the shell has its files


def test_the_help_of_every_command(run: Run) -> None:
    """Fits 80 columns, has its sections in order and ends with examples, each of which names the command."""
    code, out, _ = run("--help")
    assert code == 0
    commands = [line.split()[0] for line in out.split("Commands:\n")[1].split("\n\n")[0].splitlines()]
    assert commands[:2] == ["run", "chat"]
    assert {"bench", "trace", "convert", "info"} <= set(commands)
    for command in ["trace view" if name == "trace" else name for name in commands]:
        code, out, _ = run(*command.split(), "--help")
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
        titles = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
        order = ["Arguments:", "Options:", "Sampling options:", "Engine options:", "Examples:"]
        assert titles == [title for title in order if title in titles]
        examples = out.split("\nExamples:\n")[1].splitlines()
        assert 1 <= len(examples) <= 4
        assert all(f"tiny-vllm {command}" in line for line in examples)
