"""Traces to look at, made by the real scheduler and block allocator with a made-up model.

`record` plays the engine: it asks the scheduler for each step, lets time pass as a model would, hands out
the next word of a text that was written beforehand, and writes down what was decided, in the format of
docs/trace.md. Beside the trace it keeps the truth, the scheduler's own block tables after each step, to
compare a replay with.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Any

from tiny_vllm._core import BlockAllocator, Request, Scheduler, StepPlan

Trace = dict[str, Any]
Key = tuple[str, int]  # request id and index


@dataclass(frozen=True)
class Job:
    """A request: what is asked, what the model will say, and when it is to come and go."""

    id: str
    prompt: str
    answer: str  # one word is one token; cut at max_tokens, and shorter answers end with a stop token
    max_tokens: int = 100
    n: int = 1
    arrives_at_step: int = 0
    aborted_at_step: int | None = None


class UnseenEviction(Exception):
    """An evicted block cannot be named: the block before it had gone first, so no text leads to it."""


@dataclass
class Truth:
    """What the scheduler says itself, after one step."""

    tables: dict[int, list[int]]  # by sequence
    computed: dict[int, int]
    ref_counts: list[int]
    findable: set[int]
    generated: dict[int, int]


@dataclass
class Recording:
    trace: Trace
    truth: list[Truth] = field(default_factory=list)  # one for each of trace["steps"]


def words(text: str) -> list[str]:
    """The tokens: words, each with the space before it."""
    first, *rest = text.split(" ")
    return [first, *(f" {word}" for word in rest)]


def token_id(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "surrogatepass")) % 30_000 + 1


class Recorder:
    def __init__(self, policy: str, jobs: list[Job], run_ahead: bool, **engine: Any) -> None:
        caching = engine.get("enable_prefix_caching", True)
        self.blocks = BlockAllocator(engine["num_blocks"], engine["block_size"], caching)
        self.scheduler = Scheduler(
            policy,
            self.blocks,
            max_num_seqs=engine["max_num_seqs"],
            max_num_batched_tokens=engine["max_num_batched_tokens"],
            max_model_len=engine["max_model_len"],
        )
        self.run_ahead = run_ahead
        self.caching = caching
        self.jobs = {job.id: job for job in jobs}
        self.recording = Recording(
            {
                "format": "tiny-vllm-trace",
                "version": 1,
                "engine": {
                    "model": "made-up",
                    "device": "none",
                    "scheduler": policy,
                    "scheduling_policy": "fcfs",
                    "enable_prefix_caching": caching,
                    **engine,
                },
                "sequences": [],
                "steps": [],
            }
        )
        self.sequences: list[dict[str, Any]] = self.recording.trace["sequences"]
        self.number: dict[Key, int] = {}  # which of self.sequences
        self.living: dict[Key, Request] = {}
        self.answers: dict[Key, list[str]] = {}
        self.tables: dict[int, list[int]] = {}  # as last written
        self.texts: dict[int, list[int]] = {}  # all tokens of each sequence, for what is findable
        self.released: list[int] = []
        self.ended_unnoticed: list[Request] = []  # by a token that the host has not seen yet
        self.now = 0.0
        self.forward_end = 0.0
        self.step_number = 0
        self.evictions = 0

    # --- Requests come and go ---

    def add(self, job: Job) -> None:
        prompt = [token_id(word) for word in words(job.prompt)]
        request = Request(job.id, prompt, job.max_tokens, n=job.n, arrival=len(self.sequences))
        self.scheduler.add(request)
        self.enter(request, None)

    def enter(self, request: Request, parent: int | None) -> None:
        job = self.jobs[request.id]
        key = (request.id, request.index)
        self.number[key] = len(self.sequences)
        self.living[key] = request
        answer = words(f"{job.prompt} {job.answer}")[len(words(job.prompt)) :]
        self.answers[key] = answer[request.index :]  # siblings do not say the same
        self.sequences.append(
            {
                "request_id": request.id,
                "index": request.index,
                "parent": parent,
                "priority": 0,
                "arrival": self.now if parent is None else self.sequences[parent]["arrival"],
                "end": None,
                "finish_reason": None,
                "num_prompt_tokens": request.num_prompt_tokens,
                "prompt": job.prompt,
                "pieces": [],
                "tokens": [],
            }
        )

    def leave(self, request: Request, reason: str) -> None:
        key = (request.id, request.index)
        sequence = self.sequences[self.number[key]]
        if sequence["end"] is None:
            sequence["end"], sequence["finish_reason"] = self.now, reason
        if request in self.ended_unnoticed:
            self.ended_unnoticed.remove(request)
        if request.block_table:
            self.released.append(self.number[key])
        self.texts[self.number[key]] = request.tokens
        self.scheduler.remove(request)
        self.tables.pop(self.number[key], None)
        del self.living[key]

    def abort(self, request_id: str) -> None:
        for key, request in list(self.living.items()):
            if key[0] == request_id:
                self.leave(request, "abort")

    # --- One step ---

    def step(self) -> None:
        findable_before = self.findable()
        start = self.now
        plan = self.scheduler.schedule()
        self.step_number += 1
        record = self.describe(plan)
        lost = findable_before - self.findable()
        record["evicted"] = sorted(lost)
        if self.blocks.stats["evictions"] - self.evictions != len(lost):
            raise UnseenEviction
        self.evictions += len(lost)
        self.scheduler.commit(plan)
        forward_start = max(start + 0.0001, self.forward_end)
        self.forward_end = forward_start + 0.004 + 0.00006 * plan.num_tokens
        end = self.forward_end + 0.0002
        record["times"] = [round(t, 6) for t in (start, forward_start, self.forward_end, end)]
        # Who runs ahead schedules the next step while this one is still computed.
        self.now = max(forward_start + 0.0001, start + 0.0001) if self.run_ahead else end
        late, self.ended_unnoticed = self.ended_unnoticed, []
        for chunk in plan.chunks:
            request = chunk.request
            if chunk.start + chunk.count == request.num_tokens and request not in late:
                self.take_token(request, record)
        for request in late:
            self.leave(request, "stop")
        self.recording.trace["steps"].append(record)
        self.keep_truth()

    def describe(self, plan: StepPlan) -> dict[str, Any]:
        number = {id(r): self.number[r.id, r.index] for r in self.scheduler.running + plan.preempted}
        for request in plan.preempted:
            self.tables.pop(number[id(request)], None)
            self.texts[number[id(request)]] = request.tokens
        tables = []
        for request in self.scheduler.running:
            new, old = request.block_table, self.tables.get(number[id(request)], [])
            if new != old:
                same = next(
                    (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
                    min(len(old), len(new)),
                )
                tables.append([number[id(request)], same, new[same:]])
                self.tables[number[id(request)]] = new
        record = {
            "step": self.step_number,
            "times": [],
            "num_tokens": plan.num_tokens,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "free_blocks": self.blocks.free_blocks,
            "cached_blocks": self.blocks.cached_blocks,
            "released": self.released,
            "preempted": [number[id(r)] for r in plan.preempted],
            "admitted": [[number[id(r)], r.num_computed_tokens] for r in plan.admitted],
            "tables": tables,
            "copies": [list(copy) for copy in plan.copies],
            "evicted": [],
            "chunks": [[number[id(c.request)], c.start, c.count] for c in plan.chunks],
            "sampled": [],
        }
        self.released = []
        return record

    def take_token(self, request: Request, record: dict[str, Any]) -> None:
        family = [request]
        if request.n > 1 and request.num_output_tokens == 0:
            parent = self.number[request.id, request.index]
            for index in range(1, request.n):
                child = self.scheduler.fork(request, index)
                self.enter(child, parent)
                family.append(child)
        for sequence in family:
            key = (sequence.id, sequence.index)
            answer, made = self.answers[key], sequence.num_output_tokens
            piece = answer[made] if made < len(answer) else ""  # after the last word comes a stop token
            sequence.append(token_id(piece))
            written = self.sequences[self.number[key]]
            written["pieces"].append(piece)
            written["tokens"].append(token_id(piece))
            reason = "stop" if made >= len(answer) else None
            if reason is None and sequence.num_tokens == sequence.max_total_tokens:
                reason = "length"
            record["sampled"].append([self.number[key], token_id(piece), reason])
            if reason == "stop" and self.run_ahead:
                written["end"], written["finish_reason"] = self.now, reason
                self.ended_unnoticed.append(sequence)
            elif reason:
                self.leave(sequence, reason)

    def findable(self) -> set[int]:
        """The blocks that somebody with the right text would find."""
        if not self.caching:
            return set()
        texts = [*self.texts.values(), *(request.tokens for request in self.living.values())]
        return {block for text in texts for block in self.blocks.find_prefix(text)}

    def keep_truth(self) -> None:
        numbers = {self.number[key]: request for key, request in self.living.items()}
        self.recording.truth.append(
            Truth(
                tables={n: list(t) for n, t in self.tables.items()},
                computed={n: r.num_computed_tokens for n, r in numbers.items() if n in self.tables},
                ref_counts=[self.blocks.ref_count(b) for b in range(self.blocks.num_blocks)],
                findable=self.findable(),
                generated={n: len(s["tokens"]) for n, s in enumerate(self.sequences)},
            )
        )


def record(
    policy: str, jobs: list[Job], *, run_ahead: bool = False, truth: bool = True, **engine: Any
) -> Recording:
    recorder = Recorder(policy, jobs, run_ahead, **engine)
    if not truth:
        recorder.keep_truth = lambda: None  # type: ignore[method-assign]
    to_come = sorted(jobs, key=lambda job: job.arrives_at_step)
    to_go = {job.id: job.aborted_at_step for job in jobs if job.aborted_at_step is not None}
    while to_come or recorder.scheduler.has_unfinished():
        while to_come and (
            to_come[0].arrives_at_step <= recorder.step_number or not recorder.scheduler.has_unfinished()
        ):
            recorder.add(to_come.pop(0))
        for request_id, step in list(to_go.items()):
            if step <= recorder.step_number:
                recorder.abort(request_id)
                del to_go[request_id]
        if recorder.scheduler.has_unfinished():
            recorder.step()
    if recorder.released:  # what the last step ended
        last = recorder.describe(recorder.scheduler.schedule())
        last["step"] = recorder.step_number + 1
        last["times"] = [round(recorder.forward_end + 0.0003, 6)] * 4
        recorder.recording.trace["steps"].append(last)
        recorder.keep_truth()
    return recorder.recording


# --- The samples ---

HOUSE_RULES = (
    "You are a helpful guide of the city museum. You answer in one or two short sentences. "
    "You never guess a date. When a visitor asks for the way, you name the floor first."
)
TOWER = (
    "A guild of masons built it, and two families paid for it. Their names are cut into the stone above the "
    "door, where the stairs begin, and nobody has ever counted how many hands it took."
)
RIVERS = (
    "Tell me everything about rivers, please, and take your time, because I like long stories and the "
    "evening is young and the fire is warm."
)
A_RIVER = (
    "A river begins as rain. It falls on a hill, finds the lowest way, meets other water, and grows. It "
    "carries stones, then sand, then only mud, and where it meets the sea it lets go of all that it carried."
)
CATS = "Miso, Pepper and Captain Fluff the Second, of course."
PAGES = "Pages come and go. What was said before is kept. Nobody asks twice."

MUSEUM = [
    Job("r0", f"{HOUSE_RULES} Where are the clocks?", "On the second floor, behind the hall of maps."),
    Job("r1", f"{HOUSE_RULES} Who built the tower?", TOWER, 40, arrives_at_step=1),
    Job("r2", "Write three names for a cat.", CATS, 10, n=3, arrives_at_step=2),
    Job("r3", f"{HOUSE_RULES} Is there a café?", "Yes. Ground floor, and good cake.", arrives_at_step=3),
    Job("r4", RIVERS, A_RIVER, 40, arrives_at_step=4),
    Job("r5", f"{HOUSE_RULES} When do you close?", "At six, and at nine on Fridays.", arrives_at_step=6),
    Job("r6", "Count to ten.", "1 2 3 4 5 6 7 8 9 10", arrives_at_step=8, aborted_at_step=19),
    Job("r7", "Translate: good morning, <b>friend</b> & co.", "Guten Morgen, <i>Freund</i> & Co."),
    Job("r8", f"{HOUSE_RULES} May I bring my dog?", "Small dogs, in a bag.", arrives_at_step=12),
    Job("r9", "A haiku about caches, and one about pages, if you can.", PAGES, 20, n=2, arrives_at_step=14),
    Job("r10", f"{HOUSE_RULES} Who built the bridge?", "The railway did.", arrives_at_step=20),
    Job("r11", "Name a colour.", "Blue.", arrives_at_step=21),
]

SMALL_ENGINE = {
    "block_size": 4,
    "num_blocks": 32,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "max_model_len": 96,
}


def museum(policy: str, run_ahead: bool = False) -> Recording:
    """A shared prefix, forks that copy on write, a preemption, evictions, an abort: all in a few steps."""
    return record(policy, MUSEUM, run_ahead=run_ahead, **SMALL_ENGINE)


def same_requests(policy: str) -> Recording:
    """All there from the start, with answers of very different lengths: what static batching is bad at."""
    text = ["and so the story goes on and on and nobody knows how it will end before the day comes"] * 4
    jobs = []
    for i in range(24):
        length = (5, 9, 60, 14, 7, 30, 11, 45)[(i * 5) % 8] + i % 3
        answer = " ".join(" ".join(text).split(" ")[i % 7 : i % 7 + length])
        jobs.append(Job(f"r{i}", f"Tell story number {i}, please, as you told it to me as a child.", answer))
    engine = {
        "block_size": 8,
        "num_blocks": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 120,
    }
    return record(policy, jobs, **engine)


def random_run(seed: int) -> Recording:
    """Anything at all, in little memory."""
    draw = random.Random(seed)
    jobs = []
    for i in range(draw.randint(4, 14)):
        shared = ["a", "b", "c", "d"] * 10
        own = [draw.choice("xyz") for _ in range(draw.randint(0, 5))]
        jobs.append(
            Job(
                f"r{i}",
                " ".join(shared[: draw.choice([1, 5, 8, 16, 24, 40])] + own),
                " ".join(draw.choice("klmno") for _ in range(draw.randint(1, 20))),
                max_tokens=draw.choice([1, 2, 8, 30]),
                n=draw.choice([1, 1, 1, 2, 3]),
                arrives_at_step=draw.choice([0, 0, 1, 3, 9, 20]),
                aborted_at_step=draw.choice([None, None, None, None, 0, 2, 5, 12]),
            )
        )
    block_size = draw.choice([1, 2, 3, 4, 8])
    return record(
        draw.choice(["continuous", "continuous", "static"]),
        jobs,
        run_ahead=draw.random() < 0.5,
        block_size=block_size,
        num_blocks=draw.choice([300, 320, 400]) // block_size,
        max_num_seqs=draw.choice([3, 6, 8]),
        max_num_batched_tokens=draw.choice([4, 16, 40]),
        max_model_len=80,
        enable_prefix_caching=draw.random() < 0.8,
    )


def large(steps: int = 2000) -> Trace:
    """256 seats, 10,000 blocks, and as many steps."""
    jobs = [
        Job(
            f"request-{i}",
            " ".join(["word"] * (20 + i % 90)),
            " ".join(["again"] * (150 + (i * 37) % 450)),
            600,
        )
        for i in range(256 * steps // 500)
    ]
    trace = record(
        "continuous",
        jobs,
        truth=False,
        block_size=16,
        num_blocks=10_000,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=1024,
        enable_prefix_caching=False,
    ).trace
    return trace
