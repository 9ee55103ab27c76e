"""Exercise 22.3: what a token costs, and the cheapest batch that is quick enough.

`report` is what `json.loads` makes of benchmarks/results/cuda_engine.json. Of its results we use those called

    "batch B, 128-token prompts, 256 new: decode alone"

whose "median" is tokens a second, of all B requests together.
"""

from __future__ import annotations

import re
from typing import Any


def decode_rates(report: dict[str, Any]) -> dict[int, float]:
    """Tokens a second by batch size, of the rows named above and of no others."""
    rates = {}
    for row in report["results"]:
        found = re.fullmatch(r"batch (\d+), 128-token prompts, 256 new: decode alone", row["case"])
        if found:
            rates[int(found[1])] = float(row["median"])
    return rates


def price_of_a_million(tokens_per_second: float, price_per_hour: float, busy: float = 1.0) -> float:
    """For a million tokens, on a GPU that works at this rate for a share `busy` of each hour.

    ValueError if busy is not above 0 and at most 1.
    """
    if not 0 < busy <= 1:
        raise ValueError(f"busy is {busy}")
    return price_per_hour / (3600 * busy * tokens_per_second) * 1e6


def cheapest(report: dict[str, Any], price_per_hour: float, most_gap_ms: float) -> tuple[int, float] | None:
    """(batch, price of a million): the cheapest batch in which each user gets a token every `most_gap_ms`.

    None if no batch of the report is quick enough.
    """
    fit = [
        (price_of_a_million(rate, price_per_hour), batch)
        for batch, rate in decode_rates(report).items()
        if 1e3 * batch / rate <= most_gap_ms  # a step gives each of them one token
    ]
    if not fit:
        return None
    price, batch = min(fit)
    return batch, price
