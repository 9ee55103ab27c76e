"""Exercise 15.1: the rows of a step, end to end.

flatten(chunks) -> Step. A chunk is (tokens, start, count): the known tokens of a request, and which of its
positions are computed now, [start, start + count). Keys and values of positions before `start` are in the
cache.

token_ids and positions have an entry for each row. query_start has the first row of each request, and the
number of rows at the end. context_len says for each request how many keys its last row sees. logits_rows
are the rows after which a token is chosen: a request's last row, but only if it is its last known token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Step:
    token_ids: list[int] = field(default_factory=list)  # (T)
    positions: list[int] = field(default_factory=list)  # (T)
    query_start: list[int] = field(default_factory=list)  # (R + 1)
    context_len: list[int] = field(default_factory=list)  # (R)
    logits_rows: list[int] = field(default_factory=list)  # (n)


def flatten(chunks: Sequence[tuple[Sequence[int], int, int]]) -> Step:
    raise NotImplementedError("Your turn")
