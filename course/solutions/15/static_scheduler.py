"""Exercise 15.2: the static scheduler.

scheduler = StaticScheduler(seats, budget)
scheduler.add(request)        puts it at the end of the queue
scheduler.schedule()          -> the chunks of the next step: (request, start, count), in order of arrival
scheduler.remove(request)     a request that has ended gives its seat up

When nobody has a seat, the first ones of the queue take all seats that there are. Otherwise nobody is
admitted. As long as a prompt is not computed, a step computes prompts and nothing else: in order, up to
`budget` rows, and the last one that does not fit is cut. (The rest comes in the next step.) After that each
running request computes one row a step. budget is at least `seats`.

Who calls schedule() computes the chunks, sets request.computed, and appends a token to each request whose
chunk reached its last known token. So request.tokens and request.computed are right in the next call.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)  # two requests are equal only if they are the same one
class Request:
    prompt: int  # tokens
    tokens: int = field(init=False)  # that are known: the prompt, and what was generated
    computed: int = 0  # tokens whose keys and values are in the cache

    def __post_init__(self) -> None:
        self.tokens = self.prompt


Chunk = tuple[Request, int, int]


class StaticScheduler:
    def __init__(self, seats: int, budget: int) -> None:
        self.seats = seats
        self.budget = budget
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        self.running.remove(request)

    def schedule(self) -> list[Chunk]:
        if not self.running:
            self.running, self.waiting = self.waiting[: self.seats], self.waiting[self.seats :]
        chunks: list[Chunk] = []
        left = self.budget
        for request in self.running:
            missing = request.prompt - request.computed
            if missing > 0 and left > 0:
                count = min(missing, left)
                chunks.append((request, request.computed, count))
                left -= count
        if chunks:
            return chunks
        return [(request, request.computed, 1) for request in self.running]
