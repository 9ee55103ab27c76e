"""Exercise 22.3: what a token costs, and the cheapest batch that is quick enough.

`report` is what `json.loads` makes of benchmarks/results/cuda_engine.json. Of its results we use those called

    "batch B, 128-token prompts, 256 new: decode alone"

whose "median" is tokens a second, of all B requests together.
"""

from __future__ import annotations

from typing import Any


def decode_rates(report: dict[str, Any]) -> dict[int, float]:
    """Tokens a second by batch size, of the rows named above and of no others."""
    raise NotImplementedError("Your turn")


def price_of_a_million(tokens_per_second: float, price_per_hour: float, busy: float = 1.0) -> float:
    """For a million tokens, on a GPU that works at this rate for a share `busy` of each hour.

    ValueError if busy is not above 0 and at most 1.
    """
    raise NotImplementedError("Your turn")


def cheapest(report: dict[str, Any], price_per_hour: float, most_gap_ms: float) -> tuple[int, float] | None:
    """(batch, price of a million): the cheapest batch in which each user gets a token every `most_gap_ms`.

    None if no batch of the report is quick enough.
    """
    raise NotImplementedError("Your turn")
