"""Reads the small files of a model folder, and writes files whole.

A folder may come from anybody: no file in it may keep us waiting or fill the memory.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from .errors import ModelLoadError

MAX_JSON_BYTES = 64_000_000  # tokenizer_config.json lists added tokens; large ones have a million bytes
MAX_VOCABULARY_BYTES = 512_000_000  # tokenizer.json and tokenizer.model; large ones have forty million
MAX_TEMPLATE_BYTES = 8_000_000


def expanded(name: str | Path) -> Path:
    """With the home folder in place of "~". As in a shell, "~nobody" stays what it is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def write_whole(file: Path, text: str) -> None:
    """All of it or nothing: what was there before stays then. Raises OSError or UnicodeEncodeError."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # does not wait for the writer of a named pipe


def read_plain_file(path: Path, most_bytes: int) -> bytes:
    """The bytes of a file. Raises ModelLoadError when it cannot be read, is no plain file, or is longer."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ModelLoadError(f"{path}: cannot be read: is not a plain file")
            if facts.st_size > most_bytes:
                raise ModelLoadError(f"{path}: has {facts.st_size} bytes; at most {most_bytes} are read")
            return file.read(most_bytes)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_text(path: Path, most_bytes: int) -> str:
    """`read_plain_file` as UTF-8 text."""
    try:
        return read_plain_file(path, most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(
            f"{path}: is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None


def parse_json_object(text: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelLoadError, naming the file."""
    return parse_json_object(read_text(path, MAX_JSON_BYTES), path)
