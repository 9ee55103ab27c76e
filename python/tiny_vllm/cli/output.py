"""What the commands say beside their answers, and the words for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tiny_vllm.cache import console


def say(text: str) -> None:
    """A line on standard error: the answer alone goes to standard output."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def counted(number: float, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def size(number: float) -> str:
    """Bytes for people, in powers of a thousand as everywhere in this project."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The question whether the closest known word was meant, or "" when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
