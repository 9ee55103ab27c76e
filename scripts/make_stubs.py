"""Writes the type stubs of the C++ module, python/tiny_vllm/_core.pyi. --check says if they are fresh."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

STUBS = Path(__file__).resolve().parent.parent / "python" / "tiny_vllm" / "_core.pyi"


def generate() -> str:
    """The stubs of the `tiny_vllm._core` that this Python imports."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "--exit-code", "-o", folder, "tiny_vllm._core"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"pybind11-stubgen failed:\n{done.stdout}{done.stderr}")
        lines = (Path(folder) / "tiny_vllm" / "_core.pyi").read_text().splitlines()
        return "".join(f"{line.rstrip()}\n" for line in lines)


def main() -> int:
    fresh = generate()
    if "--check" not in sys.argv[1:]:
        STUBS.write_text(fresh)
    elif not STUBS.exists() or STUBS.read_text() != fresh:
        print(f"{STUBS} is stale: run scripts/make_stubs.sh", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
