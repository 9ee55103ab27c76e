"""python -m tiny_vllm.course [NN | journey] [--device cpu|cuda] [--figure FILE.svg]"""

from __future__ import annotations

import argparse
import io
import os
import sys

from tiny_vllm import _core
from tiny_vllm.course.lab import JOURNEY, chapters, check_figure, draw_figure, load, title
from tiny_vllm.errors import Error


def main(arguments: list[str] | None = None) -> int:
    known = chapters()
    parser = argparse.ArgumentParser(
        prog="python -m tiny_vllm.course",
        description="Runs the experiment of a chapter of the course (docs/course).",
        epilog="\n".join(
            ["chapters:", *(f"  {number:2}  {title(number)}" for number in known), f"  {JOURNEY}"]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "chapter", nargs="?", help='its number, or "journey"; without one, the chapters are listed'
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where it runs; auto, the default, is a GPU if there is one",
    )
    parser.add_argument(
        "--figure",
        metavar="FILE",
        help="also draws the chapter's figure into this SVG file (needs matplotlib)",
    )
    wanted = parser.parse_args(arguments)
    if wanted.chapter is None:
        if wanted.figure is not None:
            parser.error("--figure needs a chapter")
        parser.print_help()
        return 0
    name = int(wanted.chapter) if wanted.chapter.isdecimal() else wanted.chapter
    if name not in (*known, JOURNEY):
        parser.error(f"there is no experiment {wanted.chapter!r}; there are {_ranges(known)} and {JOURNEY}")
    device = wanted.device
    gpus, why_none = _core.cuda_devices()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    try:
        if device == "cuda" and not gpus:
            raise Error(f"--device cuda: {why_none}")
        if wanted.figure is not None:
            check_figure(wanted.figure)  # before the experiment: some take a minute
        chapter = load(name)
        data = chapter.run(device)
        if wanted.figure is not None:
            draw_figure(chapter, data, wanted.figure)
    except BrokenPipeError:
        raise  # nobody reads any more
    except (Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def script() -> int:
    """`main` in a process of its own."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # "?" for "≈" where the terminal has no such letter
    try:
        status = main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as of `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at the end
        return 1
    except OSError as error:  # the disk is full
        print(f"error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5" """
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


if __name__ == "__main__":
    sys.exit(script())
