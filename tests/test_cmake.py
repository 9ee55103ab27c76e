"""What CMake decides at configure time: flags, instruction sets, CUDA, and the sentences that say so."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import packaging_steps as steps
import pytest

pytestmark = pytest.mark.slow

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")

# Where CMake would find an nvcc, this hides it.
NVCC_FOLDERS = {str(Path(found).parent) for found in [NVCC] if found} | {"/usr/local/cuda/bin"}
NO_NVCC = f"-DCMAKE_IGNORE_PATH={';'.join(sorted(NVCC_FOLDERS))}"


def configure(
    folder: Path, *options: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Configures without building."""
    python = f"-DPython_EXECUTABLE={sys.executable}"
    # ninja may only exist beside the Python that runs the tests
    env = env or steps.clean_environment()
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return steps.run_any(
        steps.cmake(),
        "-S",
        steps.ROOT,
        "-B",
        folder,
        "-G",
        "Ninja",
        python,
        *options,
        cwd=folder.parent,
        env=env,
    )


def words(done: subprocess.CompletedProcess[str]) -> str:
    """CMake breaks the lines of its messages anywhere."""
    return " ".join(done.stdout.split())


def fake_nvcc(folder: Path, script: str) -> Path:
    """Stands for a toolkit that behaves as the script says; CMake never gets as far as compiling with it."""
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    return nvcc


def test_flags_name_instruction_sets_and_never_this_machine(tmp_path: Path) -> None:
    done = configure(tmp_path / "build", "-DTINY_VLLM_CUDA=OFF", "-DTINY_VLLM_BUILD_TESTS=ON")
    assert done.returncode == 0, done.stdout
    commands = json.loads((tmp_path / "build" / "compile_commands.json").read_text())
    assert len(commands) > 20
    for entry in commands:
        machine_flags = re.findall(r" (-m[a-z]\S*)", entry["command"])
        assert "-ffp-contract=off" in entry["command"]
        assert not [f for f in machine_flags if f.startswith(("-march", "-mtune", "-mcpu"))], entry
        if not re.search(r"/cpp/cpu/kernels_(avx2|avx512|avx512_bf16|amx|neon)\.cpp$", entry["file"]):
            assert machine_flags == [], entry


def test_kernels_offer_no_inline_functions_to_others(tmp_path: Path) -> None:
    """An inline function compiled for AVX-512 must not be what the linker keeps for the whole program."""
    build = tmp_path / "build"
    done = configure(build, "-DTINY_VLLM_CUDA=OFF", "-DTINY_VLLM_BUILD_PYTHON=OFF")
    assert done.returncode == 0, done.stdout
    commands = json.loads((build / "compile_commands.json").read_text())
    objects = [
        os.path.relpath(entry["output"], build)  # the name that ninja knows
        for entry in commands
        if re.search(r"/cpp/cpu/kernels_.*\.cpp$", entry["file"]) and re.search(r" -m[a-z]", entry["command"])
    ]
    assert objects or os.uname().machine != "x86_64"
    steps.run(steps.cmake(), "--build", build, "--target", *objects, cwd=tmp_path)
    for file in objects:
        symbols = steps.run("nm", "-C", build / file, cwd=tmp_path)
        assert " T " in symbols
        assert not re.findall(r"^\w+ W .*$", symbols, re.MULTILINE), file


def test_unknown_option_value_is_refused(tmp_path: Path) -> None:
    done = configure(tmp_path / "build", "-DTINY_VLLM_CUDA=maybe")
    assert done.returncode != 0
    assert "TINY_VLLM_CUDA=maybe: choose AUTO, ON or OFF" in words(done)


def test_fuzzers_need_clang(tmp_path: Path) -> None:
    done = configure(tmp_path / "build", "-DTINY_VLLM_BUILD_FUZZ=ON", "-DCMAKE_CXX_COMPILER=g++")
    assert done.returncode != 0
    assert "needs clang" in words(done)


def test_cuda_on_without_nvcc_fails_with_the_reason(tmp_path: Path) -> None:
    done = configure(tmp_path / "build", "-DTINY_VLLM_CUDA=ON", NO_NVCC)
    assert done.returncode != 0
    assert "TINY_VLLM_CUDA=ON, but the CUDA backend cannot be built: no nvcc on PATH" in words(done)


def test_cuda_auto_without_nvcc_says_so_and_goes_on(tmp_path: Path) -> None:
    done = configure(tmp_path / "build", NO_NVCC)
    assert done.returncode == 0, done.stdout
    assert "CUDA backend: no (TINY_VLLM_CUDA=AUTO; no nvcc on PATH" in words(done)


@pytest.mark.parametrize(("wanted", "returncode"), [("AUTO", 0), ("ON", 1)])
def test_broken_toolkit_is_quoted(tmp_path: Path, wanted: str, returncode: int) -> None:
    nvcc = fake_nvcc(tmp_path, "echo 'nvcc fatal: unsupported host compiler' >&2; exit 3")
    done = configure(tmp_path / "build", f"-DTINY_VLLM_CUDA={wanted}", f"-DCMAKE_CUDA_COMPILER={nvcc}")
    assert done.returncode == returncode, done.stdout
    assert "does not compile a small program (exit status 3: nvcc fatal: unsupported host compiler)" in words(
        done
    )


def test_native_without_a_card_says_what_to_write_instead(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "echo compute_80; echo compute_90")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = steps.clean_environment()
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    done = configure(
        *(tmp_path / "build", f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DCMAKE_CUDA_ARCHITECTURES=native"), env=env
    )
    assert done.returncode != 0
    assert "native means the GPU of this machine, and none was found" in words(done)
    assert "-DCMAKE_CUDA_ARCHITECTURES=90" in words(done)


def test_architecture_that_nvcc_does_not_know_is_refused(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "echo compute_80; echo compute_90")
    done = configure(
        tmp_path / "build", f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DCMAKE_CUDA_ARCHITECTURES=90;12345"
    )
    assert done.returncode != 0
    assert '"12345" is not one that this nvcc compiles for (80, 90)' in words(done)


@needs_nvcc
@pytest.mark.parametrize(
    ("option", "env", "expected"),
    [
        (None, {}, "80, 86, 89, 90a, 100, 120"),
        ("90", {}, "90a"),
        ("90", {"CUDAARCHS": "80"}, "90a"),
        (None, {"CUDAARCHS": "80"}, "80"),
    ],
)
def test_architectures_are_those_asked_for(
    tmp_path: Path, option: str | None, env: dict[str, str], expected: str
) -> None:
    options = [f"-DCMAKE_CUDA_ARCHITECTURES={option}"] if option else []
    done = configure(tmp_path / "build", "-DTINY_VLLM_CUDA=ON", *options, env=steps.clean_environment(**env))
    assert done.returncode == 0, done.stdout
    assert f"architectures {expected})" in words(done)


@pytest.mark.parametrize("system", ["Windows", "Darwin"])
def test_other_systems_are_told_at_once(tmp_path: Path, system: str) -> None:
    done = configure(tmp_path / "build", f"-DCMAKE_SYSTEM_NAME={system}")
    assert done.returncode != 0
    assert f"tiny-vllm is not supported on {system} yet, only on Linux" in words(done)
