"""Finds the cuBLAS of the ``nvidia-cublas`` package, for machines without the CUDA toolkit."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from tiny_vllm import _core


def find_cuda_libraries(device: str) -> None:
    """Loads cuBLAS when the device may be a GPU and the system has none of its own.

    The core opens it by name, and then finds the one that this process has loaded. When there is none at
    all, it says so.
    """
    if device == "cpu" or not _core.build_info()["cuda"] or not _core.cuda_devices()[0]:
        return
    major = _core.build_info()["cuda_version"].split(".")[0]
    for name in (f"libcublasLt.so.{major}", f"libcublas.so.{major}"):  # the second one needs the first
        try:
            ctypes.CDLL(name)
        except OSError:
            for path in _in_packages(name, major):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _in_packages(name: str, major: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = [folder / sub / "lib" / name for folder in folders for sub in (f"cu{major}", "cublas")]
    return [path for path in found if path.exists()][:1]
