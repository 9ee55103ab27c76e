"""The checked-in type stubs describe the C++ module that is being tested."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import make_stubs


def test_stubs_are_fresh() -> None:
    assert make_stubs.STUBS.read_text() == make_stubs.generate(), "stale: run scripts/make_stubs.sh"
