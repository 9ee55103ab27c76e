"""Continuous batching and chunked prefill

The same six requests under both schedulers, and what becomes of a reader when a long prompt arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tiny_vllm import Engine, SamplingParams, _core
from tiny_vllm.course.lab import BLUE, GREEN, GREY, ORANGE, RED, Data, measured, say, section, table

SEATS = 3
REQUESTS = {  # name: prompt, tokens to generate
    "a": ("The capital of France is", 40),
    "b": ("The three primary colors are", 10),
    "c": ("Two and two make", 4),
    "d": ("Once upon a time", 30),
    "e": ("def fibonacci(n):", 8),
    "f": ("The sky is blue because", 14),
}
DOCUMENT = "The cat sat on the mat and looked at the bird outside of the window. " * 30


def run(device: str) -> Data:
    section("The same six requests")
    seats = {}
    lines: list[tuple[Any, ...]] = []
    for scheduler in ("static", "continuous"):
        events = _watch(device, scheduler)
        seats[scheduler] = _seats(events)
        taken = sum(end - begin for spans in seats[scheduler] for _, begin, end in spans)
        steps = sum(bool(step["chunks"]) for step in events.steps)
        tokens = sum(len(step["sampled"]) for step in events.steps)
        lines.append((scheduler, tokens, steps, SEATS * steps, SEATS * steps - taken))
    table(("", "tokens generated", "steps", "seat-steps", "empty"), lines)
    for scheduler, rows in seats.items():
        print(f"{scheduler}, a letter for each step:")
        for number, spans in enumerate(rows):
            print(f"  seat {number}  {_in_letters(spans)}")

    section("Steps in words")
    engine = Engine(
        device=device,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=16_000_000,
        enable_prefix_caching=False,
        enforce_eager=True,
        record_events=True,
    )
    _add(engine, "reader", "The capital of France is", 8)
    for _ in range(3):
        engine.step()
    _add(engine, "long", DOCUMENT, 1, truncate=150)
    engine.step()
    _add(engine, "short", "Two and two make", 1)
    _finish(engine)
    for line in str(engine.events()).splitlines()[2:8]:
        print(line)

    section("A reader and a long prompt")
    waits: list[tuple[Any, ...]] = []
    for name, plan in POLICIES:
        world = World(plan)
        world.add(Job("reader", prompt=5, output=100, arrival=0))
        world.add(Job("long", prompt=4000, output=1, arrival=10))
        world.add(Job("short", prompt=5, output=1, arrival=12))
        world.run(200)
        waits.append((name, *world.pause("reader"), world.wait("short"), world.wait("long")))
    table(("policy", "reader, steps", "reader, tokens", "short, steps", "long, steps"), waits)
    say(
        "A prompt of 4,000 tokens and then one of 5 arrive while somebody reads. Of the reader: the longest "
        "wait between two tokens, in steps and in tokens that were computed meanwhile. Of the others: steps "
        f"until the first token. The budget is {BUDGET} tokens a step; 4,096 for whole prompts."
    )

    section("A document among many questions")
    lines_of_flood = []
    for name, plan in POLICIES[2:]:
        world = World(plan)
        world.add(Job("long", prompt=4000, output=1, arrival=0))
        for i in range(2 * 500):
            world.add(Job(f"question {i}", prompt=31, output=2, arrival=i // 2))
        world.run(500)
        of_questions = [world.wait(f"question {i}") for i in range(300)]
        typical = sorted(of_questions, key=lambda w: w or 10**9)[150]
        lines_of_flood.append((name, world.wait("long") or "never", typical))
    table(("policy", "document, steps", "a question, steps"), lines_of_flood)
    say(
        "Steps until the first token; of 300 questions the median. The document has 4,000 tokens, and two "
        "questions of 31 arrive in each of 500 steps, with an answer of two tokens: that alone fills a step. "
        f"The engine promises ceil(4000 / ceil({BUDGET}/8)) = {-(-4000 // -(-BUDGET // 8))} steps."
    )

    section("The pause, in milliseconds")
    pauses = []
    for budget in (64, 512):
        pause, first = _pause_of_reader(device, budget)
        pauses.append((budget, measured(1e3 * pause, "ms"), measured(1e3 * first, "ms")))
    table(("tokens in a step", "the reader's longest pause", "the long prompt's first token"), pauses)
    say("The small model on this machine, the best of three runs; the long prompt has 400 tokens.")

    return {"seats": seats, "requests": list(REQUESTS)}


# ---- the engine


def _add(engine: Engine, name: str, prompt: str, max_tokens: int, truncate: int | None = None) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, truncate_prompt_tokens=truncate
    )
    engine.add_request(name, prompt, params)


def _finish(engine: Engine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def _watch(device: str, scheduler: str) -> Any:
    """The events of the six requests."""
    engine = Engine(
        device=device,
        scheduler=scheduler,
        max_num_seqs=SEATS,
        kv_cache_memory_bytes=8_000_000,
        enable_prefix_caching=False,
        enforce_eager=True,  # a step that a GPU starts ahead would compute some tokens in vain
        record_events=True,
    )
    for name, (prompt, max_tokens) in REQUESTS.items():
        _add(engine, name, prompt, max_tokens)
    _finish(engine)
    return engine.events()


def _seats(events: Any) -> list[list[tuple[str, int, int]]]:
    """For each seat who had it, in steps [begin, end)."""
    sitting: dict[int, tuple[int, int]] = {}  # sequence -> seat, since
    spans: list[list[tuple[str, int, int]]] = [[] for _ in range(SEATS)]
    for number, step in enumerate(events.steps):
        for s in step["released"]:
            seat, since = sitting.pop(s)
            spans[seat].append((events.name(s), since, number))
        for s, _ in step["admitted"]:
            taken = {seat for seat, _ in sitting.values()}
            sitting[s] = min(set(range(SEATS)) - taken), number
    return spans


def _in_letters(spans: Sequence[tuple[str, int, int]]) -> str:
    text = ""
    for name, begin, end in spans:
        text += "." * (begin - len(text)) + name * (end - begin)
    return text


def _pause_of_reader(device: str, budget: int) -> tuple[float, float]:
    """Seconds: the longest between two of the reader's tokens, and until the long prompt's first; the best of
    three runs."""
    engine = Engine(
        device=device,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        kv_cache_memory_bytes=32_000_000,
        enable_prefix_caching=False,
        enforce_eager=True,
        record_events=True,
    )
    pauses, firsts = [], []
    for i in range(3):
        _add(engine, f"reader {i}", "The capital of France is", 16)
        for _ in range(4):
            engine.step()
        _add(engine, f"long {i}", DOCUMENT, 1, truncate=400)
        _finish(engine)
        events = engine.events()
        ends: dict[str, list[float]] = {}  # name -> when its tokens came
        for step in events.steps:
            for s, _, _ in step["sampled"]:
                ends.setdefault(events.name(s), []).append(step["times"][3])
        pauses.append(max(b - a for a, b in pairwise(ends[f"reader {i}"])))
        firsts.append(ends[f"long {i}"][0] - events.sequences[-1]["arrival"])
    return min(pauses), min(firsts)


# ---- policies, without a model

BUDGET = 64


@dataclass
class Job:
    name: str
    prompt: int
    output: int
    arrival: int  # the step before which it comes
    computed: int = 0  # tokens whose keys and values are in the cache
    generated: int = 0

    @property
    def left(self) -> int:
        """Tokens that are known and not computed: many in a prefill, one in a decode."""
        return self.prompt + self.generated - self.computed

    @property
    def is_prefill(self) -> bool:
        return self.computed < self.prompt


Plan = list[tuple[Job, int]]  # who computes how many of its tokens


def prefill_first(jobs: Sequence[Job]) -> Plan:
    """A step is for prompts, or if there are none for decodes."""
    prefills = [job for job in jobs if job.is_prefill]
    return _fill(prefills, BUDGET) if prefills else [(job, 1) for job in jobs][:BUDGET]


def in_order(jobs: Sequence[Job]) -> Plan:
    """Decodes, then prompts as they came."""
    decodes = [(job, 1) for job in jobs if not job.is_prefill]
    return decodes + _fill([job for job in jobs if job.is_prefill], BUDGET - len(decodes))


def shortest_first(jobs: Sequence[Job]) -> Plan:
    """Decodes, then the prompts that need least."""
    decodes = [(job, 1) for job in jobs if not job.is_prefill]
    prefills = sorted((job for job in jobs if job.is_prefill), key=lambda job: job.left)
    return decodes + _fill(prefills, BUDGET - len(decodes))


def _fill(jobs: Sequence[Job], budget: int) -> Plan:
    """As many tokens of each as there is room for."""
    plan = []
    for job in jobs:
        count = min(job.left, budget)
        if count > 0:
            plan.append((job, count))
            budget -= count
    return plan


class Ours:
    """The engine's scheduler, with blocks and seats for everybody."""

    def __init__(self, budget: int = BUDGET, chunked: bool = True) -> None:
        self.scheduler = _core.Scheduler(
            "continuous",
            _core.BlockAllocator(100_000, 16, False),
            max_num_seqs=10_000,
            max_num_batched_tokens=budget,
            max_model_len=4096,
            enable_chunked_prefill=chunked,
        )
        self.requests: dict[str, Any] = {}

    def __call__(self, jobs: Sequence[Job]) -> Plan:
        by_name = {job.name: job for job in jobs}
        for name in [name for name in self.requests if name not in by_name]:
            self.scheduler.remove(self.requests.pop(name))
        for job in jobs:
            if job.name not in self.requests:
                arrival = len(self.requests) + job.arrival * 10_000
                request = _core.Request(job.name, [0] * job.prompt, job.output, arrival=arrival)
                self.scheduler.add(request)
                self.requests[job.name] = request
            request = self.requests[job.name]
            if job.prompt + job.generated > request.num_tokens:
                request.append(0)
        plan = self.scheduler.schedule()
        self.scheduler.commit(plan)
        return [(by_name[chunk.request.id], chunk.count) for chunk in plan.chunks]


POLICIES: list[tuple[str, Callable[[], Callable[[Sequence[Job]], Plan]]]] = [
    ("whole prompts", lambda: Ours(4096, chunked=False)),
    ("chunks, prompts first", lambda: prefill_first),
    ("decodes, then prompts in order", lambda: in_order),
    ("decodes, then the shortest prompts", lambda: shortest_first),
    ("the engine's", lambda: Ours()),
]


class World:
    """Runs a policy, and notes in which step each token came and how many were computed until then."""

    def __init__(self, make_policy: Callable[[], Callable[[Sequence[Job]], Plan]]) -> None:
        self.policy = make_policy()
        self.jobs: list[Job] = []
        self.tokens: dict[str, list[tuple[int, int]]] = {}  # name -> (step, computed by all until then)
        self.arrivals: dict[str, int] = {}

    def add(self, job: Job) -> None:
        self.jobs.append(job)
        self.tokens[job.name] = []
        self.arrivals[job.name] = job.arrival

    def run(self, steps: int) -> None:
        computed = 0
        for step in range(steps):
            there = [job for job in self.jobs if job.arrival <= step and job.generated < job.output]
            plan = self.policy(there) if there else []
            computed += sum(count for _, count in plan)
            for job, count in plan:
                job.computed += count
                if job.left == 0:
                    job.generated += 1
                    self.tokens[job.name].append((step, computed))

    def pause(self, name: str) -> tuple[int, int]:
        """The longest wait between two tokens: in steps, and in tokens that were computed meanwhile."""
        pairs = list(pairwise(self.tokens[name]))
        return max(b[0] - a[0] for a, b in pairs), max(b[1] - a[1] for a, b in pairs)

    def wait(self, name: str) -> int | None:
        """Steps from the arrival to the first token."""
        return self.tokens[name][0][0] - self.arrivals[name] + 1 if self.tokens[name] else None


def draw(data: Data, figure: Any) -> None:
    colours = dict(zip(data["requests"], (BLUE, ORANGE, GREEN, RED, "#805ad5", "#b7791f"), strict=True))
    last = max(end for rows in data["seats"].values() for spans in rows for _, _, end in spans)
    for axes, (scheduler, rows) in zip(
        figure.subplots(2, 1, sharex=True), data["seats"].items(), strict=True
    ):
        end_of_all = max(end for spans in rows for _, _, end in spans)
        axes.barh(range(SEATS), [end_of_all] * SEATS, height=0.8, color="#edf2f7", hatch="//", edgecolor=GREY,
                  linewidth=0)  # fmt: skip
        for seat, spans in enumerate(rows):
            for name, begin, end in spans:
                axes.barh(seat, end - begin, left=begin, height=0.8, color=colours[name], edgecolor="white")
                axes.text((begin + end) / 2, seat, name, color="white", ha="center", va="center")
        axes.set(title=f"{scheduler}: {end_of_all} steps", ylabel="seat", yticks=range(SEATS), xlim=(0, last))
        axes.invert_yaxis()
    axes.set_xlabel("step")
