"""The ways to compute an op that a run of pytest tests: the CPU's instruction sets, or its GPU."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import DEVICE
from tiny_vllm import ops

ISAS = ops.available_isas()
WAYS = ["cuda"] if DEVICE == "cuda" else ISAS


def every_isa(test: Any) -> Any:
    return pytest.mark.cpu_only(pytest.mark.parametrize("isa", ISAS)(test))


every_way = pytest.mark.parametrize("way", WAYS)


def on(way: str) -> dict[str, Any]:
    """The arguments of an op that choose the way."""
    return {"device": "cuda"} if way == "cuda" else {"isa": way}
