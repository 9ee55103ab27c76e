"""What pip makes of the repository: wheels and sdists with the right files, which work once installed."""

from __future__ import annotations

import email
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import packaging_steps as steps
import pytest
from conftest import missing

pytestmark = pytest.mark.slow

# Import from a folder that is not the repository, and cross the border to C++ once.
USE = """
import sys, tiny_vllm
from pathlib import Path
assert Path(tiny_vllm.__file__).is_relative_to(sys.prefix), tiny_vllm.__file__
print(tiny_vllm._core.build_info())
"""

EDITED = """
from tiny_vllm import _core, errors
assert errors.EDITED
print(_core.build_info())
"""

# A small random model, read and run.
GENERATE = """
import sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import fixtures
from tiny_vllm import Engine, SamplingParams
folder = fixtures.write_rand(Path(tempfile.mkdtemp()))
fixtures.write_byte_tokenizer(folder)
engine = Engine(folder, kv_cache_memory_bytes=1 << 20, num_threads=1)
out = engine.generate(["abc"], SamplingParams(max_tokens=8, temperature=0))[0].outputs[0]
print(engine.info()["device"], "made", len(out.token_ids), "tokens")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout as it looks after some work: with an environment, build folders and stale modules in it."""
    source = steps.copy_source(tmp_path_factory.mktemp("checkout") / "tiny vllm é")
    for junk in (
        ".venv/lib/junk.py",
        "build/dev/junk.o",
        "python/tiny_vllm/__pycache__/junk.cpython-310.pyc",
        "python/tiny_vllm/_core.stale.so",
        "dist/junk.whl",
    ):
        (source / junk).parent.mkdir(parents=True, exist_ok=True)
        (source / junk).write_text("junk")
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the checkout, in isolation, with the default options."""
    out = tmp_path_factory.mktemp("wheel")
    steps.run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", out, source, cwd=out)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    steps.run(sys.executable, "-m", "build", "--sdist", "--outdir", out, source, cwd=out)
    (sdist,) = out.glob("*.tar.gz")
    return sdist


@pytest.fixture(scope="module")
def wheel_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, what it depends on, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel-venv")
    python = steps.clean_venv(folder)
    steps.run(python, "-m", "pip", "install", "-q", wheel, cwd=folder)
    return python


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tiny_vllm"}
    assert len([name for name in names if name.endswith(".so")]) == 1
    sources = [
        *(steps.ROOT / "python").rglob("*.py*"),
        *(steps.ROOT / "python").glob("tiny_vllm/trace/page/*"),
    ]
    package = {p.relative_to(steps.ROOT / "python").as_posix() for p in sources}
    package = {name for name in package if "__pycache__" not in name}
    assert {
        name for name in names if name.startswith("tiny_vllm/") and not name.endswith(".so")
    } == package | {"tiny_vllm/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Author"] == "The tiny-vllm authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "bash run.sh" in metadata.get_payload()
    assert "inference" in metadata["Keywords"]
    assert set(metadata.get_all("Provides-Extra")) == {
        "test",
        "bench",
        "server",
        "hf",
        "lint",
        "course",
        "site",
    }


def test_sdist_holds_the_source_and_no_leftovers(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "CMakeLists.txt",
        "pyproject.toml",
        "LICENSE",
        "cmake/cuda.cmake",
        "cpp/bindings/module.cpp",
    } <= names
    assert {"cuda/cuda_devices.cu", "tests/test_packaging.py", "build.sh"} <= names
    assert not [
        n
        for n in names
        if "junk" in n or n.endswith((".so", ".pyc", ".o")) or n.startswith((".venv", "build/"))
    ]


def test_wheel_works_in_a_clean_environment(wheel_python: Path, tmp_path: Path) -> None:
    assert "'version': '0." in steps.run(wheel_python, "-c", USE, cwd=tmp_path)
    assert "made 8 tokens" in steps.run(wheel_python, "-c", GENERATE, steps.ROOT / "tests", cwd=tmp_path)
    assert "version" in steps.run(wheel_python.parent / "tiny-vllm", "info", cwd=tmp_path)
    assert not (steps.run(wheel_python, "-m", "pip", "check", cwd=tmp_path)).count("requires")


def test_wheel_runs_on_an_old_processor(wheel_python: Path, tmp_path: Path) -> None:
    """Nehalem is of 2008: no AVX, no FMA. Haswell is of 2013: no AVX-512."""
    if shutil.which("qemu-x86_64") is None:
        missing("qemu-x86_64 is not installed (apt-get install qemu-user)")
    for cpu, expected in (("Nehalem", "portable"), ("Haswell", "avx2")):
        emulated = ["qemu-x86_64", "-cpu", cpu, wheel_python, "-c", GENERATE, steps.ROOT / "tests"]
        out = steps.run(*emulated, cwd=tmp_path)
        assert f"{expected}, 1 thread made 8 tokens" in out


def test_sdist_installs_editable_and_follows_the_source(sdist: Path, tmp_path: Path) -> None:
    """What was packed is enough to build from; and with `pip install -e`, Python edits are seen at once."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("tiny_vllm-*")
    python = steps.clean_venv(tmp_path / "venv")
    quick = steps.clean_environment(CMAKE_ARGS="-DTINY_VLLM_CUDA=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1")
    steps.run(python, "-m", "pip", "install", "-q", "-e", source, cwd=tmp_path, env=quick)
    with (source / "python" / "tiny_vllm" / "errors.py").open("a") as file:
        file.write("\nEDITED = True\n")
    out = steps.run(python, "-c", EDITED, cwd=tmp_path)
    assert "'cuda': False" in out
    assert "switched off by TINY_VLLM_CUDA=OFF" in out
