"""Exercise 21.3: find the lie in a benchmark.

A record says what somebody measured and what they claim. Say what is wrong with the claim, in these words:

    "cold"           the claim is the work over the MEAN time, and a first call that took more than twice the
                     median is in that mean
    "best"           the claim is the work over the SMALLEST time, and that is more than 5 % above the work
                     over the median
    "cache"          the claim is above what the machine's memory gives: the data came from somewhere else
    "not computed"   part of the prompt was found in the prefix cache, and counts as work
    "stopped early"  a request made fewer tokens than the claim counts

A claim may have several of these faults, or none. Two rates are the same when they differ by less than 1 %.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Record:
    seconds: list[float]  # of each call, in the order in which they ran
    work: float  # of one call: bytes or tokens
    claimed: float  # work a second
    ceiling: float | None = None  # of the same unit; None: nothing is known
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    asked_tokens: list[int] = field(default_factory=list)  # of each request
    made_tokens: list[int] = field(default_factory=list)


def faults(record: Record) -> set[str]:
    def is_claim(seconds: float) -> bool:
        return abs(record.claimed - record.work / seconds) < 0.01 * record.claimed

    median = statistics.median(record.seconds)
    found = set()
    if is_claim(statistics.mean(record.seconds)) and record.seconds[0] > 2 * median:
        found.add("cold")
    if is_claim(min(record.seconds)) and min(record.seconds) * 1.05 < median:
        found.add("best")
    if record.ceiling is not None and record.claimed > record.ceiling:
        found.add("cache")
    if record.cached_tokens > 0:
        found.add("not computed")
    if any(made < asked for made, asked in zip(record.made_tokens, record.asked_tokens, strict=True)):
        found.add("stopped early")
    return found
