"""Serving

A few users of the AsyncEngine: streams, cancellation, a slow reader, a queue. Then a simulated service,
with the real scheduler and a clock of our own, and what a token costs.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import deque
from typing import Any

import numpy as np

from tiny_vllm import AsyncEngine, Engine, RequestOutput, RequestOutputKind, SamplingParams, _core
from tiny_vllm.course.lab import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Data,
    measured,
    read_report,
    say,
    section,
    table,
)

PROMPTS = {
    "Ana": "The capital of France is",
    "Ben": "The three primary colors are",
    "Chi": "def fibonacci(n):",
    "Dov": "Once upon a time",
}
MAX_TTFT, MAX_GAP = 0.100, 0.020  # the objectives of the simulated service, in seconds
RATES = (100, 150, 200, 250, 300, 350, 400, 600)  # requests a second
LIMIT = 12  # requests that have no token yet
REQUESTS = 400


def run(device: str) -> Data:
    engine = Engine(
        device=device,
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
    )
    asyncio.run(_users(engine))
    _queue(device)
    load = _simulation()
    cost = _cost()
    return {**load, **cost}


def _greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


# ---- users


async def _users(engine: Engine) -> None:
    async with AsyncEngine.from_engine(engine) as server:
        await _four_users(server)
        await _who_leaves(server)
        await _slow_reader(server)


async def _four_users(server: AsyncEngine) -> None:
    async def user(prompt: str) -> RequestOutput:
        last: RequestOutput | None = None
        async for output in server.generate(prompt, _greedy(16)):
            last = output  # all there is so far
        assert last is not None
        return last

    steps = (await server.metrics())["num_steps"]
    outputs = await asyncio.gather(*(user(prompt) for prompt in PROMPTS.values()))
    steps = (await server.metrics())["num_steps"] - steps
    section("Four users at once")
    table(
        ("user", "prompt", "new", "first token after", "then one every", "begins with"),
        [
            (
                name,
                len(o.prompt_token_ids),
                len(o.outputs[0].token_ids),
                *_times(o),
                repr(o.outputs[0].text[:16]),
            )
            for name, o in zip(PROMPTS, outputs, strict=True)
        ],
    )
    say(f"64 tokens in {measured(steps)} steps.")


def _times(output: RequestOutput) -> tuple[str, str]:
    m = output.metrics
    assert m is not None
    assert m.first_token_time is not None
    assert m.finished_time is not None
    gaps = len(output.outputs[0].token_ids) - 1
    return (
        measured((m.first_token_time - m.arrival_time) * 1e3, "ms"),
        measured((m.finished_time - m.first_token_time) / gaps * 1e3, "ms"),
    )


async def _who_leaves(server: AsyncEngine) -> None:
    prompt = list(range(100, 197))  # 97 tokens: 7 blocks of 16
    lines = []

    async def note(moment: str) -> None:
        m = await server.metrics()
        used = int(m["num_blocks"] - m["num_free_blocks"])
        lines.append((moment, int(m["num_requests_running"]), used, int(m["num_aborted"])))

    await note("nobody is there")
    stream = server.generate(prompt, _greedy(500))
    await anext(stream)
    await note("a stream has its first token")
    await stream.aclose()
    await note("the stream was closed")

    async def reader() -> None:
        async for _ in server.generate(prompt, _greedy(500)):
            pass

    task = asyncio.create_task(reader())
    while (await server.metrics())["num_requests_running"] == 0:
        await asyncio.sleep(0)
    await note("a task reads")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await note("the task was cancelled")

    stream = server.generate(prompt, _greedy(500), request_id="long")
    await anext(stream)
    await note("a request called 'long' runs")
    await server.abort("long")
    last = [output async for output in stream][-1]
    await note(f"abort('long'): it ends with {last.outputs[0].finish_reason!r}")
    section("A request that leaves gives back")
    table(("moment", "running", "blocks in use", "aborted so far"), lines)


async def _slow_reader(server: AsyncEngine) -> None:
    async def read(pause: float) -> tuple[str, list[int]]:
        text, sizes = "", []
        params = _greedy(32, output_kind=RequestOutputKind.DELTA)
        async for output in server.generate("Once upon a time", params):
            text += output.outputs[0].text
            sizes.append(len(output.outputs[0].token_ids))
            await asyncio.sleep(pause)
        return text, sizes

    quick, quick_sizes = await read(0)
    slow, slow_sizes = await read(0.12)
    section("A slow reader")
    table(
        ("reader", "tokens", "outputs", "largest"),
        [
            (name, sum(sizes), measured(len(sizes)), measured(max(sizes), "tokens"))
            for name, sizes in (("reads at once", quick_sizes), ("rests 120 ms each time", slow_sizes))
        ],
    )
    say(f"The same text: {'yes' if quick == slow else 'no'}.")


# ---- a queue


def _queue(device: str) -> None:
    engine = Engine(
        device=device,
        record_events=True,
        max_num_seqs=2,
        max_model_len=512,
        kv_cache_memory_bytes=16 << 20,
        enforce_eager=True,
    )
    for i in range(8):
        engine.add_request(f"user {i + 1}", list(PROMPTS.values())[i % 4], _greedy(6))
    waiting = int(engine.metrics()["num_requests_waiting"])
    start = time.monotonic()
    ends: dict[str, float] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.metrics and output.metrics.first_token_time is not None:
                ends.setdefault(output.request_id, output.metrics.first_token_time - start)
    first: dict[int, int] = {}
    for step in engine.events().steps:
        for sequence, _, _ in step["sampled"]:
            first.setdefault(sequence, step["step"])
    section("Two seats and eight users")
    say(f"{waiting} requests were taken, none was refused.")
    table(
        ("user", "first token in step", "that is after"),
        [(f"user {s + 1}", first[s], measured(ends[f"user {s + 1}"] * 1e3, "ms")) for s in sorted(first)],
    )


# ---- a simulated service


def _simulation() -> Data:
    """The real scheduler, arrivals by chance, and a clock that moves by what a step takes on an H200."""
    results = read_report("cuda_engine")
    median = {row["case"]: row["median"] for row in results["results"]}
    batches = [1, 8, 32, 64, 256]
    decode = [median["batch 1, 32-token prompt, 128 new: per decoded token"] / 1e3]
    decode += [b / median[f"batch {b}, 128-token prompts, 256 new: decode alone"] for b in batches[1:]]
    prompt_token = median["prefill of one 2,048-token prompt"] / 1e3 / 2048

    section("What a step takes, by the report")
    table(
        ("requests in the step", "time of a decode step"),
        [(b, f"{t * 1e3:.2f} ms") for b, t in zip(batches, decode, strict=True)],
    )
    say(f"A prompt token takes {prompt_token * 1e6:.2f} µs, in a prompt of 2,048.")

    lines: list[tuple[Any, ...]] = []
    curves: dict[str, list[float]] = {"done": [], "good": [], "good with a limit": []}
    for rate in RATES:
        free = _serve(rate, None, batches, decode, prompt_token)
        limited = _serve(rate, LIMIT, batches, decode, prompt_token)
        curves["done"].append(round(free["done"], 1))
        curves["good"].append(round(free["good"], 1))
        curves["good with a limit"].append(round(limited["good"], 1))
        if rate in (100, 200, 250, 300, 400, 600):
            lines.append(
                (
                    rate,
                    f"{free['done']:.0f}",
                    f"{free['good']:.0f}",
                    f"{free['ttft_90'] * 1e3:.0f} ms",
                    f"{limited['good']:.0f}",
                    f"{limited['ttft_90'] * 1e3:.0f} ms",
                    f"{limited['refused']:.0%}",
                )
            )
    section("More users than it can serve")
    table(
        (
            "arrive a second",
            "answered",
            "good",
            "9 of 10 wait at most",
            "good, with a limit",
            "9 of 10 wait",
            "refused",
        ),
        lines,
    )
    say(
        f"Good: the first token within {MAX_TTFT * 1e3:.0f} ms, then one every {MAX_GAP * 1e3:.0f} ms or "
        f"sooner in the mean. Limit: who finds {LIMIT} requests without a token is refused. {REQUESTS} "
        "requests each, prompts of 128 to 1,024 tokens, answers of 32 to 192; simulated with the engine's "
        "scheduler."
    )
    section("Counting the wrong thing")
    ways: tuple[tuple[str, int | None, bool], ...] = (
        ("nothing", None, False),
        ("requests that wait in the scheduler's queue", LIMIT, True),
        ("requests without a token", LIMIT, False),
    )
    lines = []
    for name, limit, by_queue in ways:
        found = _serve(400, limit, batches, decode, prompt_token, by_queue)
        lines.append((name, limit or "-", f"{found['good']:.0f}", f"{found['ttft_90'] * 1e3:.0f} ms"))
    table(("what the door counts", "limit", "good a second", "9 of 10 wait at most"), lines)
    say("400 requests arrive a second.")
    return {"rates": list(RATES), **curves}


def _serve(
    rate: float,
    limit: int | None,
    batches: list[int],
    decode: list[float],
    prompt_token: float,
    by_queue: bool = False,
) -> dict[str, float]:
    rng = np.random.default_rng(22)
    arrival = np.cumsum(rng.exponential(1 / rate, REQUESTS))
    prompts, answers = rng.integers(128, 1025, REQUESTS), rng.integers(32, 193, REQUESTS)
    allocator = _core.BlockAllocator(65_536, 16, enable_prefix_caching=False)
    scheduler = _core.Scheduler(
        "continuous", allocator, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=2048
    )
    coming = deque(range(REQUESTS))
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    refused, without_a_token, now = 0, 0, 0.0
    while coming or scheduler.has_unfinished():
        if not scheduler.has_unfinished():
            now = max(now, float(arrival[coming[0]]))
        while coming and arrival[coming[0]] <= now:
            i = coming.popleft()
            counted = len(scheduler.waiting) if by_queue else without_a_token
            if limit is not None and counted >= limit:
                refused += 1
                continue
            without_a_token += 1
            scheduler.add(_core.Request(str(i), [1] * int(prompts[i]), int(answers[i]), arrival=i))
        if not scheduler.has_unfinished():
            continue
        plan = scheduler.schedule()
        chunks = [(c.request, c.count) for c in plan.chunks]
        long = sum(count for _, count in chunks if count > 1)
        one = sum(count == 1 for _, count in chunks)
        now += float(np.interp(max(one, 1), batches, decode)) + long * prompt_token
        scheduler.commit(plan)
        for request, _ in chunks:
            if request.num_computed_tokens < request.num_tokens:
                continue  # a part of a prompt: no token comes of it
            request.append(1)
            i = request.arrival
            if i not in first:
                first[i] = now
                without_a_token -= 1
            if request.num_output_tokens == answers[i]:
                last[i] = now
                scheduler.remove(request)
    seconds = max(last.values()) - float(arrival[0])
    ttft = {i: first[i] - float(arrival[i]) for i in last}
    good = sum(ttft[i] <= MAX_TTFT and (last[i] - first[i]) / (int(answers[i]) - 1) <= MAX_GAP for i in last)
    return {
        "done": len(last) / seconds,
        "good": good / seconds,
        "refused": refused / REQUESTS,
        "ttft_90": statistics.quantiles(ttft.values(), n=10)[-1],
    }


# ---- money


def _cost() -> Data:
    price = float(os.environ.get("PRICE_PER_HOUR", "1.00"))
    results = read_report("cuda_engine")
    lines, points = [], []
    for row in results["results"]:
        tokens, case = _tokens_per_second(row)
        million = price / 3600 / tokens * 1e6
        lines.append((case, f"{tokens:,.0f}", f"{million:.4f}", f"{million / 0.3:.4f}"))
        if "decode alone" in case or case.startswith("batch 1,"):
            points.append((int(case.split(",")[0].removeprefix("batch ")), round(million, 5)))
    section("What a million tokens cost")
    say(
        f"At {price:.2f} an hour for the GPU (the variable PRICE_PER_HOUR sets another price), by "
        "benchmarks/results/cuda_engine.json:"
    )
    table(("case", "tokens a second", "a million", "busy 30 % of the time"), lines)
    return {"price": price, "cost": points}


def _tokens_per_second(row: dict[str, Any]) -> tuple[float, str]:
    case = row["case"].replace(": per decoded token", ": decode alone")
    if row["unit"] == "tok/s":
        return float(row["median"]), case
    if case.startswith("prefill"):
        return int(case.split()[3].split("-")[0].replace(",", "")) / row["median"] * 1e3, case
    return 1e3 / row["median"], case


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    rates = data["rates"]
    left.plot(rates, rates, color=GREY, linewidth=1, linestyle=":", label="all that arrive")
    left.plot(rates, data["done"], color=GREY, label="answered")
    left.plot(rates, data["good"], color=ORANGE, label="good")
    left.plot(rates, data["good with a limit"], color=GREEN, label=f"good, at most {LIMIT} without a token")
    left.set(
        title="Goodput of a simulated service",
        xlabel="requests that arrive a second",
        ylabel="requests a second",
        ylim=(0, 450),
    )
    left.legend(loc="upper left", fontsize=9)
    batch, cost = zip(*data["cost"], strict=True)
    right.plot(batch, cost, "o-", color=BLUE)
    right.set(
        title=f"A million output tokens, at {data['price']:.2f} an hour",
        xlabel="requests in the batch (log scale)",
        ylabel="price (log scale)",
        xscale="log",
        yscale="log",
    )
    for b, c in data["cost"]:
        right.text(b * 1.12, c * 1.08, f"{c:.4f}", fontsize=9)
    right.set_xlim(0.8, 900)
