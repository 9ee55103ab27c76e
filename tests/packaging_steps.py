"""What tests of the build share: a copy of the source, a clean environment, commands that must succeed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What a fresh clone has, by name: a checkout may hold build folders and environments beside it.
_TOP_LEVEL = (
    *("CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", ".gitignore"),
    *("cmake", "cpp", "cuda", "python", "scripts", "tests"),
    *("build.sh", "run.sh", "test.sh", "full_test.sh", "lint.sh", "nsys.sh", "ncu.sh"),
)
_JUNK = shutil.ignore_patterns("__pycache__", "*.so", ".hypothesis", ".pytest_cache")


def copy_source(to: Path) -> Path:
    """The files that a clone would have."""
    for name in _TOP_LEVEL:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=_JUNK)
        else:
            to.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def clean_environment(**changes: str) -> dict[str, str]:
    """The environment of a person at a fresh shell: nothing of the Python that runs the tests."""
    keep = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PYTHON", "PYTEST", "CMAKE", "CUDA", "SKBUILD"))
    }
    keep.pop("VIRTUAL_ENV", None)
    keep.pop("CXX", None)
    return keep | changes


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    """The output of a command that must succeed."""
    done = run_any(*command, cwd=cwd, env=env)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout[-8000:]}"
    return done.stdout


def run_any(
    *command: object, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Standard output and error come back together, as `stdout`."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env or clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def clean_venv(folder: Path) -> Path:
    """The Python of a new environment that has pip and nothing else."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def cmake() -> str:
    """The CMake that came with the build requirements, else the system's."""
    beside = Path(sys.executable).parent / "cmake"
    found = str(beside) if beside.exists() else shutil.which("cmake")
    assert found, "no cmake: build.sh installs it into .venv"
    return found
