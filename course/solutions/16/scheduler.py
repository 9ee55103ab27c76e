"""Exercise 16.1: continuous batching.

Each call of schedule() decides who computes how many tokens in the next step. The one who calls it (the
test) plays the engine: it adds what was computed to `computed`, appends a token when a request has no
uncomputed one left, and calls finish() at a request's last token.

The rules, which the test checks in each step:

  1. A step has at most `budget` tokens, and at most one chunk a request. No chunk is empty.
  2. At most `seats` requests run. They are admitted as they came, and none waits beside a free seat.
  3. First each running decode gets its token. (There are never more seats than half of the budget, so
     decodes always leave something.)
  4. Then prefills, in chunks. Of what the decodes leave, the oldest prefill has a right to half, rounded
     up, if it needs as much. The other half goes to the shortest remaining prefills; of equals the older
     goes first.
  5. Whatever is left then goes to the oldest: no token of the budget is wasted while a prefill could use
     it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Request:
    name: str
    prompt: int  # tokens
    known: int  # tokens: the prompt's, then those that were generated as well
    computed: int = 0  # tokens whose keys and values are in the cache

    @property
    def uncomputed(self) -> int:
        """One in a decode, as many as are missing in a prefill."""
        return self.known - self.computed

    @property
    def is_prefill(self) -> bool:
        return self.computed < self.prompt


@dataclass
class Chunk:
    """Positions [start, start + count) of a request."""

    request: Request
    start: int
    count: int


class Scheduler:
    def __init__(self, seats: int, budget: int) -> None:
        self.seats = seats
        self.budget = budget
        self.waiting: list[Request] = []  # as they came
        self.running: list[Request] = []  # as they were admitted

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """It has its last token, and gives its seat up."""
        self.running.remove(request)

    def schedule(self) -> list[Chunk]:
        chunks = [Chunk(r, r.computed, 1) for r in self.running if not r.is_prefill]
        left = self.budget - len(chunks)
        while self.waiting and len(self.running) < self.seats and left > 0:
            self.running.append(self.waiting.pop(0))

        prefills = [r for r in self.running if r.is_prefill]
        if not prefills:
            return chunks
        oldest, *others = prefills
        left_for_others = left - min(-(-left // 2), oldest.uncomputed)
        for request in sorted(others, key=lambda r: r.uncomputed):  # sorted() keeps the order of equals
            count = min(left_for_others, request.uncomputed)
            if count > 0:
                chunks.append(Chunk(request, request.computed, count))
                left_for_others -= count
                left -= count
        count = min(left, oldest.uncomputed)
        if count > 0:
            chunks.append(Chunk(oldest, oldest.computed, count))
        return chunks
