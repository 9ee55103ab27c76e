"""What the experiments share: finding, printing, teaching kernels, figures."""

from __future__ import annotations

import ast
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import tiny_vllm.course
from tiny_vllm import _core
from tiny_vllm.errors import DeviceError, Error
from tiny_vllm.plain_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Data = dict[str, Any]  # plain numbers, text, lists and dicts: they are kept in the figure's file
JOURNEY = "journey"
REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Chapter:
    title: str
    run: Callable[[str], Data]  # device -> the numbers of the figure
    draw: Callable[[Data, Figure], None]


def chapters() -> list[int]:
    """The numbers of the chapters that have an experiment."""
    names = (module.name for module in pkgutil.iter_modules(tiny_vllm.course.__path__))
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"chapter_(\d\d)", name)))


def load(name: int | str) -> Chapter:
    """The experiment of a chapter, by its number, or the "journey"."""
    found = importlib.import_module(f"tiny_vllm.course.{_module(name)}")
    return Chapter(title(name), found.run, found.draw)


def title(name: int | str) -> str:
    """The first line of its docstring. Nothing is imported for it: the list of all is quick."""
    source = Path(__file__).with_name(f"{_module(name)}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]


def _module(name: int | str) -> str:
    return name if isinstance(name, str) else f"chapter_{name:02}"


# ---- printing


def section(title: str) -> None:
    """A heading. docs/course quotes the output by these titles."""
    print(f"\n== {title} ==", flush=True)


def say(text: str) -> None:
    """A paragraph, at most 100 columns wide."""
    print(textwrap.fill(" ".join(text.split()), width=100))


def measured(value: float, unit: str = "", digits: int = 3) -> str:
    """A number that differs from run to run and machine to machine: "≈ 12.3 ms"."""
    return f"≈ {value:.{digits}g} {unit}".rstrip() if value < 1000 else f"≈ {value:,.0f} {unit}".rstrip()


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns of text to the left, of numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    is_number = [
        all(re.fullmatch(r"[≈ \d.,+\-%xe]+( ?[a-zA-Zµ/%]{1,7})?|-|", row[i]) for row in cells)
        for i in range(len(header))
    ]
    for row in [list(header), *cells]:
        line = "  ".join(
            cell.rjust(w) if right else cell.ljust(w)
            for cell, w, right in zip(row, widths, is_number, strict=True)
        )
        print(line.rstrip())


# ---- what is in the repository and not in an installed package


def repository_file(name: str) -> Path:
    """Raises Error, which names it, when it is not there."""
    path = REPOSITORY / name
    if not path.is_file():
        raise Error(
            f"{path} is missing: this experiment needs the repository, not the installed package alone"
        )
    return path


def read_report(name: str) -> Data:
    """benchmarks/results/NAME.json: what a benchmark measured."""
    path = repository_file(f"benchmarks/results/{name}.json")
    found: Data = json.loads(path.read_text(encoding="utf-8"))
    return found


# ---- the teaching kernels of course/kernels


class Kernels:
    """A file of course/kernels, compiled for a device. Its functions return nothing, or raise Error."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(_compiled(path, device)))

    def __call__(self, function: str, *arguments: Any) -> None:
        """Arrays go as pointers, whole numbers as int, others as float, ctypes as they are."""
        entry = getattr(self.library, function)
        entry.restype = ctypes.c_char_p
        problem = entry(*map(_as_c, arguments))
        if problem is not None:
            raise Error(f"{self.path.name}: {function}: {problem.decode()}")


def kernels(name: str, device: str) -> Kernels:
    """course/kernels/NAME, as it runs on a GPU or, with simt.h, on a CPU."""
    return Kernels(repository_file(f"course/kernels/{name}"), device)


def pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return array.ctypes.data_as(ctypes.c_void_p)


def _as_c(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        return pointer(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return argument


@functools.lru_cache
def _compiled(source: Path, device: str) -> Path:
    """The shared library of a .cpp or .cu file, in a folder that goes when the process does."""
    # A folder for each: a library that has the path of a loaded one would not be loaded.
    library = Path(tempfile.mkdtemp(dir=_build_folder().name)) / f"{source.stem}-{device}.so"
    if device == "cuda":
        nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
        nvcc = nvcc or str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc")
        major = _core.cuda_devices()[0][0].compute_capability if _core.cuda_devices()[0] else 0
        command = [
            nvcc,
            "-std=c++20",
            f"-arch=sm_{major}" if major else "-arch=native",
            "-O3",
            "-Xcompiler",
            "-fPIC",
        ]
    else:
        compiler = os.environ.get("CXX", "c++")
        command = [compiler, "-std=c++20", "-O2", "-fPIC", "-x", "c++"]
        if _is_gcc(compiler):  # or the __shared__ of two templates of one name would be one, in all libraries
            command.append("-fno-gnu-unique")
    command += ["-shared", "-I", str(REPOSITORY / "course" / "kernels"), "-o", str(library), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise DeviceError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        raise Error(f"{source.name} does not compile:\n{done.stdout}{done.stderr}")
    return library


@functools.lru_cache
def _is_gcc(compiler: str) -> bool:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    except OSError:
        return False
    return "Free Software Foundation" in done.stdout


@functools.lru_cache(maxsize=1)
def _build_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-vllm-course-")


# ---- figures

BLUE, ORANGE, GREEN, RED, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030", "#718096"


def check_figure(path: str) -> None:
    """Raises Error if no figure can be drawn there."""
    if Path(path).suffix != ".svg":
        raise Error(f"--figure {path}: the name must end in .svg")
    if Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK):
        raise Error(f"--figure {path}: no file can be written there")
    if importlib.util.find_spec("matplotlib") is None:
        raise Error("figures need matplotlib: ./build.sh course")


def draw_figure(chapter: Chapter, data: Data, path: str) -> None:
    """Writes the figure as SVG, on white, with its numbers inside as JSON (the metadata's description)."""
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "tiny-vllm",
        "font.family": "sans-serif",
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 12,
        "axes.grid": False,
        "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, RED, GREY]),
        "legend.frameon": False,
    }
    with rc_context(style), tempfile.TemporaryDirectory() as folder:
        figure = Figure(figsize=(8, 4), layout="constrained")
        chapter.draw(data, figure)
        svg = Path(folder) / "figure.svg"
        metadata = {"Date": None, "Creator": None, "Title": chapter.title, "Description": json.dumps(data)}
        figure.savefig(svg, facecolor="white", metadata=metadata)
        write_whole(Path(path), svg.read_text(encoding="utf-8"))


def figure_data(path: Path) -> Data:
    """The numbers inside of a figure that draw_figure wrote."""
    from xml.etree import ElementTree

    found = ElementTree.parse(path).find(".//{http://purl.org/dc/elements/1.1/}description")
    if found is None or found.text is None:
        raise Error(f"{path} holds no data; was it written by --figure?")
    data: Data = json.loads(found.text)
    return data
