"""The folder for converted models, one process at a time in it, and progress bars for what takes long."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from .errors import ModelLoadError

console = Console(stderr=True)  # so that nothing said in between mixes with an answer


def cache_folder() -> Path:
    """Where converted models are kept: $TINY_VLLM_CACHE, else tiny-vllm below $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("TINY_VLLM_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tiny-vllm"


@contextmanager
def folder_lock(target: Path) -> Iterator[None]:
    """Only one process at a time makes the folder `target`; the lock ends with the process in any case.

    Raises ModelLoadError when the cache cannot be written to.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(target.parent / f".{target.name}.lock"))
        lock.acquire()
    except OSError as error:
        raise ModelLoadError(
            f"{target.parent}: the cache cannot be written to ({error.strerror or error}); "
            "set TINY_VLLM_CACHE to a folder that can"
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar, moved by calling the result with (bytes done, bytes in all)."""
    with _progress(title, BarColumn(), DownloadColumn()) as report:
        yield report


@contextmanager
def count_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """The same for things that are counted: (done, in all)."""
    with _progress(title, BarColumn(), MofNCompleteColumn()) as report:
        yield report


@contextmanager
def spinner(title: str) -> Iterator[None]:
    """Moves by itself, for what cannot say how far it is."""
    with _progress(title, SpinnerColumn()):
        yield


@contextmanager
def _progress(title: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """Gone when done. Where nobody watches (a file, a pipe), nothing is shown, not even an empty line."""
    shown = (TextColumn("{task.description}"), *columns, TimeElapsedColumn())
    with Progress(*shown, console=console, transient=True, disable=not console.is_interactive) as progress:
        task = progress.add_task(title, total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield report
