"""Static batching

What a step of several requests saves, how their rows lie side by side, and who waits for whom.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tiny_vllm import Engine, SamplingParams, _core
from tiny_vllm.course.chapter_12 import Model
from tiny_vllm.course.lab import BLUE, GREY, ORANGE, RED, Data, measured, say, section, table

PROMPTS = ("The capital of France is", "Hello", "A short list of things that one should not forget at home:")
LENGTHS = (3, 6, 20, 4, 9, 2, 5, 28, 4, 12, 7, 6)  # tokens of the answers
SEATS = 4


def simulate(policy: str, lengths: list[int], seats: int, prompt: int = 8) -> tuple[int, int]:
    """The engine's scheduler without a model: steps, and seats that computed something, summed over them."""
    allocator = _core.BlockAllocator(num_blocks=1 << 16, block_size=16)
    scheduler = _core.Scheduler(
        policy, allocator, max_num_seqs=seats, max_num_batched_tokens=1 << 14, max_model_len=1 << 13
    )
    wanted = {}
    for i, length in enumerate(lengths):
        request = _core.Request(str(i), [1] * prompt, length, arrival=i)
        wanted[request.id] = length
        scheduler.add(request)
    steps = used = 0
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        scheduler.commit(plan)
        steps, used = steps + 1, used + len(plan.chunks)
        for chunk in plan.chunks:
            request = chunk.request
            request.append(0)
            if request.num_output_tokens == wanted[request.id]:
                scheduler.remove(request)
    return steps, used


def run(device: str) -> Data:
    section("The weights are read once")
    engine = Engine(device=device, max_num_seqs=64)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    _read_once(engine)

    section("Two layouts")
    texts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    longest = max(map(len, texts))
    rows = sum(map(len, texts))
    for text in texts:
        say(" ".join(["#"] * len(text) + ["."] * (longest - len(text))))
    padded = longest * len(texts)
    say(f"As a rectangle: {len(texts)} x {longest} = {padded} rows, of which {padded - rows} are padding.")
    starts = np.cumsum([0, *map(len, texts)]).tolist()
    say(f"Flat: {rows} rows, query_start = {starts}.")

    section("The last row of the rectangle")
    model = Model(device)
    lines = []
    for name, ids in (("the text's last row", texts[0]), ("the rectangle's last row", texts[0] + [0] * 8)):
        token = int(model.forward(ids).argmax())
        lines.append((name, len(ids), repr(tokenizer.decode([token], skip_special_tokens=False))))
    table(("logits of", "rows", "next token"), lines)

    section("Twelve requests, four seats")
    static = Engine(device=device, scheduler="static", max_num_seqs=SEATS, record_events=True)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in LENGTHS]
    static.generate([PROMPTS[i % 3] for i in range(len(LENGTHS))], params)
    record = static.events().steps
    steps = [step for step in record if step["chunks"]]
    seats = _seats(record)
    batches = []
    for first in range(0, len(LENGTHS), SEATS):
        lengths = LENGTHS[first : first + SEATS]
        begin = min(seats[i][1][0][0] for i in range(first, first + len(lengths)))
        empty = len(lengths) * max(lengths) - sum(lengths)
        batches.append((begin, " ".join(map(str, lengths)), max(lengths), f"{np.mean(lengths):.2f}", empty))
    table(("first step", "answers", "steps", "average answer", "empty seats"), batches)
    used, total = sum(len(step["chunks"]) for step in steps), len(steps) * SEATS
    say(f"{len(steps)} steps with {SEATS} seats: {total} seats, {used} used, {1 - used / total:.0%} empty.")
    guess = sum(LENGTHS) / SEATS
    say(f"By the average answer we had expected {sum(LENGTHS)} / {SEATS} = {guess:.1f} steps.")

    section("Larger batches")
    lengths = np.ceil(np.random.default_rng(15).exponential(100, 512)).astype(int).tolist()
    share = {}
    larger = []
    for number in (1, 2, 4, 8, 16, 32, 64):
        count, busy = simulate("static", lengths, number)
        share[number] = 1 - busy / (count * number)
        larger.append((number, f"{count:,}", f"{sum(lengths) / number:,.0f}", f"{share[number]:.0%}"))
    table(("seats", "steps", "if no seat were empty", "empty"), larger)
    say(
        f"512 answers of {min(lengths)} to {max(lengths)} tokens, {np.mean(lengths):.0f} on average; "
        "the engine's scheduler, without a model."
    )

    section("Memory set aside")
    limit, average = 1024, float(np.mean(lengths))
    kept = engine.info()["kv_bytes_per_token"]
    say(
        f"{kept * limit / 1e6:.1f} MB for an answer that may have {limit} tokens; "
        f"{kept * average / 1e6:.1f} MB for one that has {average:.0f}."
    )
    return {
        "seats": {str(i): [seat, spans] for i, (seat, spans) in seats.items()},
        "steps": len(steps),
        "empty": {str(n): round(x, 4) for n, x in share.items()},
    }


def _read_once(engine: Engine) -> None:
    engine.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=4))  # the first steps are slower
    lines = []
    for requests in (1, 2, 4, 8, 16):
        params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
        prompts = [[100 + i, 200, 300, 400] for i in range(requests)]
        before, start = engine.metrics(), time.perf_counter()
        engine.generate(prompts, params)
        seconds, after = time.perf_counter() - start, engine.metrics()
        tokens = after["num_generated_tokens"] - before["num_generated_tokens"]
        steps = after["num_steps"] - before["num_steps"]
        read = (after["bytes_read"] - before["bytes_read"]) / tokens
        lines.append((requests, steps, tokens, f"{read / 1e6:.1f}", measured(tokens / seconds, "tok/s")))
    table(("requests", "steps", "tokens", "MB read for each", "together"), lines)


def _seats(steps: list[dict[str, Any]]) -> dict[int, tuple[int, list[list[int]]]]:
    """Of each sequence its seat, and when it computes: [first step, steps, 1 if prefill]."""
    seat_of: dict[int, int] = {}
    result: dict[int, tuple[int, list[list[int]]]] = {}
    number = 0  # of the step; a record without chunks is none
    for step in steps:
        number += bool(step["chunks"])
        for sequence in step["released"]:
            seat_of.pop(sequence, None)
        for sequence, start, count in step["chunks"]:
            if sequence not in seat_of:
                seat_of[sequence] = min(set(range(SEATS)) - set(seat_of.values()))
                result[sequence] = (seat_of[sequence], [])
            spans = result[sequence][1]
            is_prefill = int(start == 0 or count > 1)
            if spans and spans[-1][2] == is_prefill and spans[-1][0] + spans[-1][1] == number:
                spans[-1][1] += 1
            else:
                spans.append([number, 1, is_prefill])
    return result


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.9, 1))
    left.barh(
        range(SEATS), data["steps"], left=0.5, height=0.86, color="white", edgecolor=GREY, hatch="///", lw=0.5
    )
    for request, (seat, spans) in data["seats"].items():
        for first, count, is_prefill in spans:
            left.broken_barh(
                [(first - 0.5, count)], (seat - 0.43, 0.86), color=ORANGE if is_prefill else BLUE, lw=0
            )
        left.text(spans[0][0] + 0.7, seat, str(int(request) + 1), color="white", va="center", fontsize=8)
    left.set(xlim=(0.5, data["steps"] + 0.5), ylim=(SEATS - 0.4, -0.6), xlabel="step", ylabel="seat")
    left.set_yticks(range(SEATS), [str(i + 1) for i in range(SEATS)])
    left.set_title("Prompts (orange), decodes (blue), nobody (hatched)")
    seats = [int(n) for n in data["empty"]]
    right.plot(seats, [100 * x for x in data["empty"].values()], "o-", color=RED)
    right.set(title="Empty seats", xlabel="seats (log)", ylabel="share, %", xscale="log", ylim=(0, 100))
    right.set_xticks(seats, [str(n) for n in seats])
    right.minorticks_off()
