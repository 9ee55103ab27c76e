"""From what a person calls a model to a folder that the engine can load.

resolve_model("bundled")                             # the small model that comes with tiny_vllm; None too
resolve_model("~/models/Llama-3.2-1B-Instruct")      # a folder
resolve_model("model.Q8_0.gguf")                     # a GGUF file, converted once
resolve_model("meta-llama/Llama-3.2-1B-Instruct")    # an id on the Hugging Face Hub
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from .bundled import BUNDLED, bundled_model_folder
from .cache import byte_progress, cache_folder, console, folder_lock
from .errors import ModelLoadError, shown
from .gguf_import import CONVERTER_VERSION, convert_gguf
from .hub import download
from .plain_files import expanded, read_text

MAX_CONFIG_BYTES = 8_000_000  # the core's own limit; real ones have some thousand
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w.-]*")


def resolve_model(
    model: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool | None = None,
) -> Path:
    """The folder of a model: of the bundled one (None), a folder, a .gguf file, or an id on the Hub.

    The text "bundled" is the bundled model wherever one is; a folder of that name is "./bundled", or a Path.
    `revision`, `token`, `cache_dir` and `local_files_only` are those of `hub.download` and only for ids.
    Raises ModelLoadError that says what was looked for and where.
    """
    if model is None or model == BUNDLED:
        return bundled_model_folder()
    if not str(model):
        raise ModelLoadError("model is an empty text; leave it out for the bundled model")
    path = expanded(model)
    text = str(model)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a name that the system refuses to look up
        raise ModelLoadError(f"{shown(text)}: cannot be read: {error.strerror}") from None
    if is_folder:
        return path
    if is_file:
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(
                f"{path}: is a file, but not a .gguf; give the folder with config.json, or a .gguf file"
            )
        return converted_gguf(path)
    is_path = (
        isinstance(model, Path) or path.is_absolute() or text.startswith((".", "~")) or os.sep * 2 in text
    )
    if is_path or path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(text):
        raise ModelLoadError(
            f"{path}: no such folder or file (looked in {Path.cwd()}); a model on the Hub is named owner/name"
        )
    return download(
        text, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
    )


def read_config_json(folder: Path) -> str:
    """The text of a model folder's config.json. Raises ModelLoadError when there is none that can be read."""
    file = folder / "config.json"
    if not file.exists():
        raise ModelLoadError(f"{folder} is not a model folder: it has no config.json")
    return read_text(file, MAX_CONFIG_BYTES)


def converted_gguf(path: Path) -> Path:
    """The Hugging Face folder of a GGUF file, converted on first use and kept in the cache.

    A file is known by its real path, size and time of change: hashing many gigabytes at each start would take
    longer than loading them.
    """
    real = path.resolve()
    facts = real.stat()
    identity = f"{real}\0{facts.st_size}\0{facts.st_mtime_ns}\0{CONVERTER_VERSION}"
    key = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    target = cache_folder() / "gguf" / f"{real.stem}-{key}"
    if not (target / "config.json").is_file():
        with folder_lock(target):
            if not (target / "config.json").is_file():  # another process may have been faster
                with byte_progress(f"Converting {path.name}") as progress:
                    convert_gguf(real, target, progress)
                taken = sum(file.stat().st_size for file in target.iterdir())
                console.print(
                    f"note: converted to {target} ({taken / 1e6:.0f} MB); later runs use it",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
    return target
