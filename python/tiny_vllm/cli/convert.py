"""``tiny-vllm convert``: a model as a Hugging Face folder, or as a GGUF file."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tiny_vllm.bundled import BUNDLED
from tiny_vllm.cache import byte_progress
from tiny_vllm.cli.app import command
from tiny_vllm.cli.options import begin_with_bundled
from tiny_vllm.cli.output import say, size
from tiny_vllm.errors import Error, ModelLoadError
from tiny_vllm.gguf_file import GGUFFile
from tiny_vllm.gguf_import import convert_gguf
from tiny_vllm.model_files import read_config_json, resolve_model
from tiny_vllm.plain_files import expanded

_SMALL_FILES = 64_000_000  # more than config and tokenizer take, where their size is not known before
_OTHER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)


@command(
    examples="""
    tiny-vllm convert model.Q8_0.gguf my-model
    tiny-vllm convert Qwen/Qwen3-0.6B my-model
    tiny-vllm convert bundled smollm2.gguf
    """
)
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder, a .gguf file, a Hub id, or bundled: the small model.",
            autocompletion=begin_with_bundled,
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            help="The folder to write; a name that ends in .gguf is a file with bfloat16 weights.",
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace TARGET if it is a model already.")] = False,
) -> None:
    """Write a model as a Hugging Face folder or a GGUF file.

    TARGET appears whole or not at all. Files from a Hugging Face folder to another are copied as they are;
    otherwise weights become bfloat16.
    """
    target = expanded(target)
    given = None if source == BUNDLED else expanded(source)
    is_file = target.suffix.lower() == ".gguf"
    _check_target(target, given, is_file, force)
    gguf = given if given and os.path.isfile(given) and given.suffix.lower() == ".gguf" else None
    folder = resolve_model(source) if gguf is None else None
    if folder is not None:
        read_config_json(folder)
    _check_apart(folder or expanded(source), target)
    try:
        with _work_folder(target) as work:
            if gguf is not None:
                _require_room(target, _bytes_of_gguf(gguf) * (2 if is_file else 1))
                with byte_progress(
                    f"Reading {gguf.name}" if is_file else f"Converting {gguf.name}"
                ) as progress:
                    folder = convert_gguf(gguf, work / "model", progress)
            assert folder is not None
            if is_file:
                made = _write_gguf(folder, work / "model.gguf", target)
            elif gguf is not None:
                made = folder
            else:
                made = _copy(folder, work / "model", target)
            _put(made, target, work)
    except KeyboardInterrupt:
        say(f"stopped; {target} is as it was before")
        raise
    except OSError as error:
        raise Error(f"{target} cannot be written: {error.strerror or error}") from None
    _report(target)


def _check_target(target: Path, source: Path | None, is_file: bool, force: bool) -> None:
    """What stands in the way is said before anything is fetched or written. Raises BadParameter."""

    def refuse(reason: str) -> None:
        raise typer.BadParameter(f"{target} {reason}", param_hint="TARGET")

    if not target.name:
        refuse("is not a name for a model; give a new one")
    parent = target.absolute().parent
    if not parent.is_dir():
        refuse("cannot be written: no such folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        refuse("cannot be written: no permission to write in this folder")
    # os.path's answers, because Path's raise when a name is too long.
    if source is not None and os.path.exists(source) and os.path.exists(target) and source.samefile(target):
        refuse("is SOURCE itself; give another name")
    if not os.path.lexists(target):
        return
    is_empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if is_empty and not is_file:
        return
    if not force:
        refuse("exists already; give a new name, or --force to replace it")
    is_model = _is_gguf_file(target) if is_file else _is_model_folder(target)
    if target.is_symlink() or not is_model:
        refuse(f"is not a {'GGUF file' if is_file else 'model folder'}, and --force replaces nothing else")


# What the folders of models on the Hub hold.
_OF_A_MODEL = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*token*.json",
    "tokenizer.*",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "README.md",
    "LICENSE*",
    "NOTICE*",
    ".gitattributes",
)


def _is_gguf_file(file: Path) -> bool:
    """By what it begins with. The name says nothing: it is the one that was asked for."""
    try:
        with open(file, "rb") as opened:
            return opened.read(4) == b"GGUF"
    except OSError:
        return False


def _is_model_folder(folder: Path) -> bool:
    """And nothing else: what --force replaces must not take somebody's other work along."""
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        return False
    return all(
        path.is_file() and any(path.match(pattern) for pattern in _OF_A_MODEL)
        for path in folder.iterdir()
        if path.name != "additional_chat_templates"
    )


def _check_apart(source: Path, target: Path) -> None:
    here, there = source.resolve(), target.resolve()
    if here == there or there in here.parents or here in there.parents:
        raise typer.BadParameter(
            f"{target} and SOURCE lie one in the other; give another name",
            param_hint="TARGET",
        )


def _require_room(target: Path, wanted: int) -> None:
    parent = target.absolute().parent
    free = shutil.disk_usage(parent).free
    if free < wanted:
        raise Error(f"{target} needs {size(wanted)}, and {parent} has {size(free)} free")


def _bytes_of_gguf(file: Path) -> int:
    """What it takes as a folder: 2 bytes a number."""
    return _SMALL_FILES + 2 * sum(math.prod(t.shape) for t in GGUFFile(file).tensors.values())


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target: what is made in it needs only another name. It is always removed."""
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.absolute().parent))
    try:
        yield work
    finally:
        with _without_ctrl_c():
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """What is inside is not left half done. It is short, and a Ctrl-C that comes then is too late.

    Not by a mask, which is one thread's: another one, as numpy has them, would take the signal.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _put(made: Path, target: Path, work: Path) -> None:
    """Gives what was made its name; what had the name before goes with the work folder."""
    with _without_ctrl_c():
        if made.is_file() or not target.exists():
            os.replace(made, target)
            return
        os.replace(target, work / "before")
        try:
            os.replace(made, target)
        except BaseException:
            os.replace(work / "before", target)
            raise


def _write_gguf(folder: Path, file: Path, target: Path) -> Path:
    from tiny_vllm.gguf_export import write_gguf_bf16

    _require_room(target, sum(path.stat().st_size for path in _files(folder)))
    with byte_progress(f"Writing {target.name}") as progress:
        return write_gguf_bf16(folder, file, progress)


def _files(folder: Path) -> list[Path]:
    """Those that the engine reads."""
    weights = [
        p for p in sorted(folder.glob("*.safetensors")) if not p.name.startswith(("consolidated", "adapter"))
    ]
    if not weights:
        raise ModelLoadError(f"{folder} has no weights in safetensors files")
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return [*(folder / name for name in _OTHER_FILES if (folder / name).is_file()), *more, *weights]


def _copy(folder: Path, made: Path, target: Path) -> Path:
    files = _files(folder)
    total = sum(path.stat().st_size for path in files)
    _require_room(target, total)
    made.mkdir()
    done = 0
    with byte_progress(f"Copying to {target.name}") as progress:
        for path in files:
            copy = made / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            done = _copy_file(path, copy, done, lambda done: progress(done, total))
    return made


def _copy_file(path: Path, copy: Path, done: int, progress: Callable[[int], None]) -> int:
    try:
        with open(path, "rb") as file, open(copy, "wb") as out:
            while piece := file.read(1 << 22):
                out.write(piece)
                done += len(piece)
                progress(done)
    except OSError as error:
        raise Error(f"{path} cannot be copied: {error.strerror or error}") from None
    return done


def _report(target: Path) -> None:
    files = [target] if target.is_file() else sorted(p for p in target.rglob("*") if p.is_file())
    for path in files:
        print(f"{path}: {size(path.stat().st_size)}")
    print(f'run it with: tiny-vllm run --model {shlex.quote(str(target))} "Hello"')
