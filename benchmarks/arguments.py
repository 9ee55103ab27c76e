"""What the arguments of the benchmarks share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def writable_file(text: str) -> Path:
    """The argument of --json, looked at before the work and not after it."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path
