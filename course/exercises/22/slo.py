"""Exercise 22.2: what a load test of a server says.

A record is what a client saw of one request. Times are seconds of one clock.

    ttft       time to first token: from sending the request to its first token
    gaps       the times between neighbouring tokens of one request
    good       a request that was answered in full, with ttft <= most_ttft, and a MEAN gap <= most_gap
    goodput    good requests a second: over the time from the first request sent to the last token of all
"""

from __future__ import annotations

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
    raise NotImplementedError("Your turn")


def summary(records: Sequence[Record], most_ttft: float, most_gap: float) -> Summary:
    raise NotImplementedError("Your turn")
