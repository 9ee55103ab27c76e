"""The scripts of the repository root, run as people run them: from anywhere, inside anything, and twice."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import packaging_steps as steps
import pytest

pytestmark = pytest.mark.slow

QUICK = "-DTINY_VLLM_CUDA=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh copy of the repository, in a folder whose name tries the quoting."""
    return steps.copy_source(tmp_path_factory.mktemp("clone") / "tiny vllm é")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with another environment, and the variables of a shell in which that one is active."""
    folder = tmp_path_factory.mktemp("elsewhere")
    other = steps.clean_venv(folder / "other-venv").parent.parent
    poison = folder / "poison"
    poison.mkdir()
    (poison / "tiny_vllm.py").write_text("raise ImportError('the module on PYTHONPATH was taken')\n")
    env = steps.clean_environment(VIRTUAL_ENV=str(other), PYTHONPATH=str(poison), CMAKE_ARGS=QUICK)
    env["PATH"] = f"{other / 'bin'}{os.pathsep}{env['PATH']}"
    return folder, env


@pytest.fixture(scope="module")
def built(clone: Path, elsewhere: tuple[Path, dict[str, str]]) -> str:
    """What the first build.sh printed."""
    folder, env = elsewhere
    return steps.run(clone / "build.sh", cwd=folder, env=env)


def compiled_files(clone: Path) -> list[str]:
    """Those that the last build compiled, according to its log."""
    log = (clone / "build" / "logs" / "build.log").read_text()
    return re.findall(r"Building \w+ object \S*/(\w+\.\w+)\.o", log)


def test_build_uses_its_own_environment(
    clone: Path, elsewhere: tuple[Path, dict[str, str]], built: str
) -> None:
    folder, _ = elsewhere
    assert "making .venv" in built
    assert (
        f"building tiny-vllm (about 2 minutes the first time; what the compiler says is in {clone}/build/"
        in built
    )
    assert "module.cpp" in compiled_files(clone)
    found = steps.run(
        clone / ".venv/bin/python", "-c", "import tiny_vllm; print(tiny_vllm._core.__file__)", cwd=folder
    )
    assert Path(found.strip()).is_relative_to(clone / ".venv")
    other = steps.run_any(
        folder / "other-venv/bin/python", "-c", "import tiny_vllm", cwd=folder, env=steps.clean_environment()
    )
    assert "ModuleNotFoundError" in other.stdout


def test_second_build_compiles_nothing(
    clone: Path, elsewhere: tuple[Path, dict[str, str]], built: str
) -> None:
    folder, env = elsewhere
    log = clone / "build" / "logs" / "build.log"
    before = log.read_bytes()
    assert steps.run(clone / "build.sh", cwd=folder, env=env) == "tiny-vllm is up to date\n"
    assert log.read_bytes() == before


def test_run_help_from_elsewhere(clone: Path, elsewhere: tuple[Path, dict[str, str]], built: str) -> None:
    folder, env = elsewhere
    out = steps.run(clone / "run.sh", "--help", cwd=folder, env=env)
    assert out.startswith("Usage: tiny-vllm run ")
    assert "--max-tokens" in out


def test_run_through_a_link(clone: Path, elsewhere: tuple[Path, dict[str, str]], built: str) -> None:
    """As from ~/bin: a link to a link, the second of them relative."""
    folder, env = elsewhere
    (clone / "tiny").symlink_to("run.sh")
    (folder / "tiny").symlink_to(clone / "tiny")
    done = steps.run_any(folder / "tiny", "Hello", "--model", "./not/there", cwd=folder, env=env)
    assert done.returncode == 1
    assert done.stdout.startswith("tiny-vllm is up to date\nModelLoadError: ")


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="no pip older than 23.2 runs on Python 3.12 and newer"
)
def test_an_old_pip_is_brought_up_to_date(
    clone: Path, elsewhere: tuple[Path, dict[str, str]], built: str
) -> None:
    """Debian 12 makes environments with pip 23.0, Ubuntu 22.04 with 22.0, neither of which knows -C."""
    folder, env = elsewhere
    python = clone / ".venv/bin/python"
    steps.run(python, "-m", "pip", "install", "-q", "pip==22.0.2", cwd=folder)
    (clone / ".venv/.tiny_vllm/build").unlink()
    assert "building tiny-vllm" in steps.run(clone / "build.sh", cwd=folder, env=env)


def test_a_build_of_your_own_is_made_as_contributing_says(
    clone: Path, elsewhere: tuple[Path, dict[str, str]], built: str
) -> None:
    """Up to the configuration, in a shell that has only what the system has."""
    folder, _ = elsewhere
    text = (steps.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"## A build of your own.*?```bash\n(.*?)```", text, re.DOTALL)
    assert block
    commands = block[1].partition("cmake --build")[0].replace("/tmp/tiny-vllm", str(folder / "own"))
    assert "cmake -S" in commands
    out = steps.run(
        *("bash", "-ec", commands),
        cwd=clone,
        env=steps.clean_environment(PATH="/usr/local/bin:/usr/bin:/bin"),
    )
    assert "Build files have been written" in out


def test_wrong_options_of_pytest_are_told_before_the_tests_are_built(
    clone: Path, elsewhere: tuple[Path, dict[str, str]], built: str
) -> None:
    folder, env = elsewhere
    done = steps.run_any(clone / "test.sh", "--nosuch", cwd=folder, env=env)
    assert done.returncode == 2
    assert "unrecognized arguments: --nosuch" in done.stdout
    assert "./test.sh -k scheduler" in done.stdout
    assert not (clone / "build/dev/tiny_vllm_tests").exists()


def test_an_edit_recompiles_that_file_alone(
    clone: Path, elsewhere: tuple[Path, dict[str, str]], built: str
) -> None:
    folder, env = elsewhere
    source = clone / "cpp" / "base" / "build_info.cpp"
    source.write_text(source.read_text() + "\n// edited\n")
    assert "building tiny-vllm" in steps.run(clone / "build.sh", cwd=folder, env=env)
    assert compiled_files(clone) == ["build_info.cpp"]


def test_a_failing_build_shows_the_error_and_is_tried_again(
    clone: Path, elsewhere: tuple[Path, dict[str, str]], built: str
) -> None:
    folder, env = elsewhere
    source = clone / "cpp" / "base" / "build_info.cpp"
    good = source.read_text()
    source.write_text(good + "\nthis is not C++\n")
    for _ in range(2):
        done = steps.run_any(clone / "build.sh", cwd=folder, env=env)
        assert done.returncode != 0
        assert "build_info.cpp" in done.stdout
        assert "The whole output is in" in done.stdout
    source.write_text(good)
    steps.run(clone / "build.sh", cwd=folder, env=env)


def test_gpu_tests_say_why_none_ran(clone: Path, elsewhere: tuple[Path, dict[str, str]], built: str) -> None:
    """The clone is built without CUDA, so there is a reason on every machine."""
    folder, env = elsewhere
    done = steps.run_any(clone / "full_test.sh", "--gpu", cwd=folder, env=env)
    assert done.returncode != 0
    assert "No GPU test was run: this build of tiny_vllm has no CUDA backend" in done.stdout


def test_unknown_extra_is_refused(clone: Path, elsewhere: tuple[Path, dict[str, str]], built: str) -> None:
    folder, env = elsewhere
    done = steps.run_any(clone / "build.sh", "nosuch", cwd=folder, env=env)
    assert done.returncode == 2
    assert "no extra is called nosuch; there are: server bench test course site lint hf\n" in done.stdout


def fake_python(folder: Path, body: str) -> str:
    script = folder / "fake-python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def build_in_empty_clone(tmp_path: Path, **env: str) -> str:
    """What build.sh says where it must refuse."""
    clone = steps.copy_source(tmp_path / "clone")
    done = steps.run_any(clone / "build.sh", cwd=tmp_path, env=steps.clean_environment(**env))
    assert done.returncode != 0, done.stdout
    assert not (clone / ".venv").exists()
    return done.stdout


def test_old_python_is_refused(tmp_path: Path) -> None:
    python = fake_python(tmp_path, '[ "$1" = --version ] && echo Python 3.8.10; exit 1')
    assert f"needs Python 3.10 or newer; {python} is Python 3.8.10" in build_in_empty_clone(
        tmp_path, PYTHON=python
    )


def test_missing_compiler_names_the_package(tmp_path: Path) -> None:
    out = build_in_empty_clone(tmp_path, CXX="/bin/false", PYTHON=sys.executable)
    assert "sudo apt-get install -y g++\n" in out


def test_everything_missing_is_one_line(tmp_path: Path) -> None:
    python = fake_python(
        tmp_path, f'case "$2" in *ensurepip* | *Python.h*) exit 1 ;; esac\nexec "{sys.executable}" "$@"'
    )
    out = build_in_empty_clone(tmp_path, CXX="/bin/false", PYTHON=python)
    assert "sudo apt-get install -y g++ python3-dev python3-venv\n" in out
