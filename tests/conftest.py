"""What all tests share."""

from __future__ import annotations

import importlib.util
import os

import pytest


def require_package(name: str) -> None:
    """For tests against another library. Skips without it; fails in the full run, where nothing may be missing."""
    if importlib.util.find_spec(name) is not None:
        return
    reason = f"the package {name} is not installed"
    if os.environ.get("TINY_VLLM_FULL_TEST") == "1":
        pytest.fail(reason + ", and TINY_VLLM_FULL_TEST=1 asks for all of them")
    pytest.skip(reason)
