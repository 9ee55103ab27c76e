"""How a test finds what the learner wrote.

pytest course/exercises/06                 tests your files beside the tests
pytest course/exercises/06 --solution      tests the files of course/solutions instead
pytest course/exercises/18 --device cuda   compiles CUDA with nvcc and runs it on a GPU
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tiny_vllm._core import cuda_devices
from tiny_vllm.course.lab import Kernels
from tiny_vllm.errors import Error

EXERCISES = Path(__file__).resolve().parent
SOLUTIONS = EXERCISES.parent / "solutions"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--solution", action="store_true", help="test the solutions instead of your files")
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where kernels run")


def pytest_configure(config: pytest.Config) -> None:
    gpus, why_none = cuda_devices()
    if config.getoption("--device") == "cuda" and not gpus:
        raise pytest.UsageError(f"--device cuda: {why_none}")


class Exercise:
    """The files that a test is about."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.device = device

    def python(self, name: str) -> ModuleType:
        """The module in this file."""
        spec = importlib.util.spec_from_file_location(f"exercise_{Path(name).stem}", self.folder / name)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    def kernels(self, name: str) -> Kernels:
        """The functions of a .cpp or .cu file, which come through `report` of simt.h."""
        try:
            return Kernels(self.folder / name, self.device if name.endswith(".cu") else "cpu")
        except Error as error:
            problem = str(error)
        pytest.fail(problem, pytrace=False)

    def library(self, name: str) -> ctypes.CDLL:
        """A .cpp file whose functions return numbers."""
        return self.kernels(name).library


@pytest.fixture
def exercise(request: pytest.FixtureRequest) -> Exercise:
    folder = request.path.parent
    if request.config.getoption("--solution"):
        folder = SOLUTIONS / folder.relative_to(EXERCISES)
    return Exercise(folder, request.config.getoption("--device"))
