"""Exercise 22.2: what a load test of a server says.

A record is what a client saw of one request. Times are seconds of one clock.

    ttft       time to first token: from sending the request to its first token
    gaps       the times between neighbouring tokens of one request
    good       a request that was answered in full, with ttft <= most_ttft, and a MEAN gap <= most_gap
    goodput    good requests a second: over the time from the first request sent to the last token of all
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    sent: float
    tokens: list[float]  # when each token came
    finished: bool = True  # False: refused, aborted or failed, perhaps in the middle


@dataclass(frozen=True)
class Summary:
    ttft_50: float  # percentiles over all requests that had a first token
    ttft_99: float
    gap_50: float  # percentiles over all gaps of all requests
    gap_99: float
    goodput: float


def percentile(values: Sequence[float], p: float) -> float:
    """The smallest of the values that at least p percent of them do not exceed. ValueError without values."""
    if not values:
        raise ValueError("a percentile of nothing")
    rank = math.ceil(len(values) * p / 100)
    return sorted(values)[max(rank, 1) - 1]


def summary(records: Sequence[Record], most_ttft: float, most_gap: float) -> Summary:
    ttfts, gaps, good = [], [], 0
    for record in records:
        if not record.tokens:
            continue
        ttft = record.tokens[0] - record.sent
        mine = [later - earlier for earlier, later in zip(record.tokens, record.tokens[1:], strict=False)]
        ttfts.append(ttft)
        gaps += mine
        mean = sum(mine) / len(mine) if mine else 0.0  # one token has no gap that could be too long
        good += record.finished and ttft <= most_ttft and mean <= most_gap
    begin = min(record.sent for record in records)
    end = max(record.tokens[-1] for record in records if record.tokens)
    return Summary(
        percentile(ttfts, 50),
        percentile(ttfts, 99),
        percentile(gaps, 50),
        percentile(gaps, 99),
        good / (end - begin),
    )
