"""`World` plays the engine for a Scheduler, without a model.

In place of keys and values, each slot of its cache holds the name of a text: the salt and all tokens up to
the one whose keys and values would be there, which is exactly what they depend on. Before and after each step
every slot that a request may read is compared with the request's own text, so a block that is shared, reused,
found or written wrongly shows up as foreign text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tiny_vllm._core import BlockAllocator, Request, Scheduler, StepPlan


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def place_of(request: Request) -> tuple[int, int, int]:
    return request.priority, request.arrival, request.index


@dataclass
class World:
    policy: str = "continuous"
    num_blocks: int = 64
    block_size: int = 16
    max_num_seqs: int = 8
    budget: int = 64
    max_model_len: int = 4096
    prefix_caching: bool = True
    chunked: bool = True
    constant_hash: int | None = None
    stop_chance: float = 0.0  # of ending after any token, as an end token does
    vocab: int = 1000

    steps: int = 0
    finished: dict[tuple[str, int], int] = field(default_factory=dict)  # (id, index) -> step
    first_token: dict[tuple[str, int], int] = field(default_factory=dict)  # (id, index) -> step
    computed: dict[tuple[str, int], int] = field(default_factory=dict)  # tokens computed for each
    admitted: list[str] = field(default_factory=list)  # ids, in the order of first admission
    preemptions: int = 0
    copies: int = 0
    last_admission: int = -(10**9)
    families: dict[str, list[Request]] = field(default_factory=dict)  # id -> its living sequences
    log: list[dict[tuple[str, int], int]] = field(default_factory=list)  # tokens of each, step by step

    def __post_init__(self) -> None:
        self.blocks = BlockAllocator(
            self.num_blocks, self.block_size, self.prefix_caching, constant_hash=self.constant_hash
        )
        self.scheduler = Scheduler(
            self.policy,
            self.blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
            enable_chunked_prefill=self.chunked,
        )
        self.cache = [[-1] * self.block_size for _ in range(self.num_blocks)]  # text that each slot holds
        self.names: dict[tuple[int, int], int] = {}  # (text before, token) -> text
        self.texts: dict[tuple[str, int], list[int]] = {}  # of each sequence, up to each of its tokens
        self.arrivals = 0

    # --- What a caller does ---

    def add(self, name: str, prompt: int | list[int], max_tokens: int = 8, **options: int | bool) -> Request:
        """A prompt given as a number is that many tokens of a text of its own."""
        if isinstance(prompt, int):
            prompt = [sum(map(ord, name)) * 1000 + i for i in range(prompt)]
        request = Request(name, prompt, max_tokens, arrival=self.arrivals, **options)
        self.scheduler.add(request)
        self.arrivals += 1
        self.texts = {key: text for key, text in self.texts.items() if key[0] != name}
        self.families[name] = [request]
        return request

    def abort(self, name: str) -> None:
        for request in self.families.pop(name, []):
            self.scheduler.remove(request)
            assert request.state == "finished"
            assert request.block_table == []
        self.check_books()

    def run(self, limit: int = 3000) -> None:
        while self.scheduler.has_unfinished():
            assert limit > 0, f"no end: {self.scheduler.running} {self.scheduler.waiting}"
            limit -= 1
            self.step()
        assert self.blocks.owned_blocks == 0
        assert self.blocks.free_blocks == self.num_blocks

    # --- What the engine does ---

    def step(self) -> StepPlan:
        running_before = list(self.scheduler.running)
        plan = self.scheduler.schedule()
        self.steps += 1
        self.check_plan(plan, running_before)
        for source, destination in plan.copies:
            self.cache[destination] = list(self.cache[source])
        for chunk in plan.chunks:
            self.check_readable(chunk.request, chunk.start)
        written: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            text, table = self.text(chunk.request), chunk.request.block_table
            for position in range(chunk.start, chunk.start + chunk.count):
                block, offset = table[position // self.block_size], position % self.block_size
                assert (block, offset) not in written, f"two writers of place {offset} in block {block}"
                written.add((block, offset))
                self.cache[block][offset] = text[position]
        for chunk in plan.chunks:
            self.check_readable(chunk.request, chunk.start + chunk.count)
        self.scheduler.commit(plan)
        self.check_books()
        for chunk in plan.chunks:
            if chunk.start + chunk.count == chunk.request.num_tokens:
                self.take_token(chunk.request)
        self.check_books()
        return plan

    def take_token(self, request: Request) -> None:
        family = self.families[request.id]
        sequences = [request]
        if request.n > 1 and request.num_output_tokens == 0:
            children = [self.scheduler.fork(request, index) for index in range(1, request.n)]
            family.extend(children)
            sequences += children
        for sequence in sequences:
            key = (sequence.id, sequence.index)
            # Like a sampler with a seed: it depends on the sequence and the position only.
            draw = random.Random(f"{key} {sequence.num_tokens}")
            sequence.append(draw.randrange(self.vocab))
            self.first_token.setdefault(key, self.steps)
            if sequence.num_tokens == sequence.max_total_tokens or draw.random() < self.stop_chance:
                assert key not in self.finished
                self.finished[key] = self.steps
                family.remove(sequence)
                self.scheduler.remove(sequence)

    # --- What must hold at any time ---

    def text(self, request: Request) -> list[int]:
        """For each token, the name of the text that ends with it. Equal names are equal texts."""
        text = self.texts.setdefault((request.id, request.index), [])
        for token in request.tokens[len(text) :]:
            before = text[-1] if text else -2 - request.cache_salt
            text.append(self.names.setdefault((before, token), len(self.names)))
        return text

    def check_readable(self, request: Request, end: int) -> None:
        text = self.text(request)
        for i, block in enumerate(request.block_table[: ceil_div(end, self.block_size)]):
            own = text[i * self.block_size : min(end, (i + 1) * self.block_size)]
            assert self.cache[block][: len(own)] == own, f"{request} reads foreign text in its block {i}"

    def check_plan(self, plan: StepPlan, running_before: list[Request]) -> None:
        scheduled = [chunk.request for chunk in plan.chunks]
        assert plan.num_tokens == sum(chunk.count for chunk in plan.chunks) <= self.budget
        assert len(set(map(id, scheduled))) == len(scheduled), "one chunk for each request"
        assert plan.chunks or plan.preempted, "nothing happens"
        if plan.admitted and plan.preempted:  # for somebody who goes before them
            first = min(r.priority for r in plan.admitted)
            assert all(r.priority > first for r in plan.preempted)
            assert not set(map(id, plan.admitted)) & set(map(id, plan.preempted))
        for chunk in plan.chunks:
            assert chunk.request.state == "running"
            assert chunk.start == chunk.request.num_computed_tokens
            assert 1 <= chunk.count <= chunk.request.num_tokens - chunk.start
            if not self.chunked:
                assert chunk.start + chunk.count == chunk.request.num_tokens
            key = (chunk.request.id, chunk.request.index)
            self.computed[key] = self.computed.get(key, 0) + chunk.count
        self.log.append({(c.request.id, c.request.index): c.count for c in plan.chunks})
        for request in plan.admitted:
            if request.num_preemptions == 0:
                self.admitted.append(request.id)
                assert request.num_cached_tokens == request.num_computed_tokens
                assert 0 <= request.num_cached_tokens < request.num_tokens
        for request in plan.preempted:
            assert request.state == "waiting"
            others = [r for r in running_before if r not in plan.preempted]
            assert all(place_of(r) < place_of(request) for r in others), "the last in order first"
        self.preemptions += len(plan.preempted)
        self.copies += len(plan.copies)
        if plan.admitted:
            self.last_admission = self.steps
        if self.policy == "static":
            self.check_static_plan(plan, running_before)

    def check_static_plan(self, plan: StepPlan, running_before: list[Request]) -> None:
        assert not plan.preempted
        assert not (plan.admitted and running_before), "a batch is closed"
        running = self.scheduler.running
        in_prefill = [c for c in plan.chunks if c.start < c.request.num_prompt_tokens]
        assert in_prefill == plan.chunks or not in_prefill, "first all prompts, then all decodes"
        if not in_prefill:
            assert len(plan.chunks) == min(len(running), self.budget), "lockstep"
        if plan.admitted:
            worst = sum(r.n * ceil_div(r.max_total_tokens, self.block_size) for r in running)
            assert worst <= self.num_blocks

    def check_books(self) -> None:
        self.scheduler.check_invariants()
        running = self.scheduler.running
        owned = {block for request in running for block in request.block_table}
        assert self.blocks.owned_blocks == len(owned)
        assert self.blocks.free_blocks == self.num_blocks - len(owned)
        assert len(running) <= self.max_num_seqs
        for request in running:
            self.check_readable(request, request.num_computed_tokens)
