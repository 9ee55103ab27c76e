"""Paged KV cache

Eight real requests in one small cache: what a reservation wastes, who owns which block, where a token
lies.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiny_vllm import Engine, SamplingParams, _core, ops
from tiny_vllm.course.lab import BLUE, GREEN, GREY, ORANGE, RED, Data, say, section, table
from tiny_vllm.course.layers import DH, HK, H, SmallModel, plain_attention
from tiny_vllm.errors import InternalError

# Questions, and how many tokens the small model answers, 64 at most. The lengths are fixed, because another
# processor rounds in another way, and an answer may end elsewhere.
QUESTIONS = {
    "What is gravity?": 64,
    "What is 2 + 2?": 12,
    "Tell me a joke.": 38,
    "Name three colors.": 12,
    "Who wrote Hamlet?": 64,
    "Say hello.": 23,
    "What is the capital of France?": 8,
    "Why is the sky blue?": 64,
}
NAMES = "abcdefgh"
BLOCK_SIZE, NUM_BLOCKS, SEATS, MAX_TOKENS, MAX_MODEL_LEN = 16, 24, 3, 64, 2048
TOKEN_BYTES = 2 * 30 * HK * DH * 2  # keys and values, 30 layers, bfloat16


def run(device: str) -> Data:
    events = _watch(device)
    lengths = [len(s["prompt_token_ids"]) for s in events.sequences]
    generated = [sum(s == i for step in events.steps for s, _, _ in step["sampled"]) for i in range(8)]
    finals = [n + count - 1 for n, count in zip(lengths, generated, strict=True)]  # the last is not computed

    section("What a reservation costs")
    ways: dict[str, list[int]] = {
        f"the longest context, {MAX_MODEL_LEN:,}": [MAX_MODEL_LEN] * len(finals),
        f"prompt + max_tokens, {MAX_TOKENS}": [n + MAX_TOKENS for n in lengths],
    }
    for size in (256, 64, BLOCK_SIZE, 1):
        ways[f"blocks of {size}"] = [-(-n // size) * size for n in finals]
    pool = 64_000_000 // TOKEN_BYTES
    table(
        ("set aside", "tokens", "used", "empty", "requests in 64 MB"),
        [
            (name, f"{sum(kept):,}", sum(finals), f"{1 - sum(finals) / sum(kept):.0%}",
             pool * len(kept) // sum(kept))
            for name, kept in ways.items()
        ],
    )  # fmt: skip
    say(
        f"Eight requests. At the end they had {', '.join(map(str, finals))} tokens in the cache. "
        f"A token takes {TOKEN_BYTES:,} bytes in the small model, so 64 MB are {pool:,} tokens."
    )

    section("Holes")
    refused, in_sum, empty = _holes()
    say(
        "Requests of 1 to 200 tokens come and go, 20,000 of them, in one memory of 2,000 tokens. "
        f"{refused:,} found no place in one piece. For {in_sum:,} of these enough was free in sum: "
        f"{empty:.0%} of the memory, on average."
    )

    section("Who owns which block")
    tables, free = _tables(events)
    full = [i for i, step in enumerate(tables) if len(step) == SEATS]
    scattered = [i for i in full if all(np.any(np.diff(owned) != 1) for owned in tables[i].values())]
    moment = (scattered or full)[0]
    shown = tables[moment]
    for s, blocks in shown.items():
        say(f"{NAMES[s]}: {' '.join(map(str, blocks))}")
    say(f"Step {moment + 1}; {free[moment]} of {NUM_BLOCKS} blocks are free.")

    section("From a position to a slot")
    name, blocks = next(iter(shown.items()))
    table(
        ("position", "index in the table", "block", "offset", "slot"),
        [
            (p, p // BLOCK_SIZE, blocks[p // BLOCK_SIZE], p % BLOCK_SIZE,
             blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE)
            for p in (0, 1, 15, 16, 47, 48, 63, 64, 80) if p // BLOCK_SIZE < len(blocks)
        ],
    )  # fmt: skip
    say(f"Of request {NAMES[name]}.")

    section("A slot that is a position")
    encode = SmallModel().tokenizer.encode
    first, second = (
        encode(
            "The cat sat on the mat and looked at the bird outside of the window, "
            "which flew away when it saw the cat."
        ),
        encode(
            "Another text, about the price of bread and butter in the large cities "
            "of the north in the year 1920."
        ),
    )
    lines = []
    for title, right in (("slot = position", False), ("slot from the table", True)):
        alone = _attention_errors([first], right, device)
        both = _attention_errors([first, second], right, device)
        lines.append((title, *(f"{error:.1%}" for error in (*alone, *both))))
    table(("", "first alone", "first of two", "second of two"), lines)
    say("How far the last token's attention output is off, as a share of its largest number.")

    section("Block by block")
    for line in _one_by_one():
        print(line)

    section("The books")
    blocks_of = _core.BlockAllocator(NUM_BLOCKS, BLOCK_SIZE, False)
    refused = _random_walk(blocks_of, 10_000)
    say(
        f"10,000 random calls, {refused:,} of them refused. After each, free + owned was {NUM_BLOCKS}, "
        "and no block was in two tables."
    )
    given = blocks_of.allocate(1) or []
    blocks_of.release(given)
    try:
        blocks_of.release(given)
    except InternalError as error:
        print(f"And a second release of the same block: {str(error).split(' (check', 1)[0]}.")

    return {
        "blocks": _spans(tables),
        "reserved": {name: sum(kept) for name, kept in ways.items()},
        "used": sum(finals),
        "steps": len(tables),
    }


def _watch(device: str) -> Any:
    engine = Engine(
        device=device,
        max_num_seqs=SEATS,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_SIZE * TOKEN_BYTES,
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        enable_prefix_caching=False,
        enforce_eager=True,
        record_events=True,
    )
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in QUESTIONS.values()]
    engine.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    return engine.events()


def _tables(events: Any) -> tuple[list[dict[int, list[int]]], list[int]]:
    """After each step's scheduling: every sequence's block table, and how many blocks are free."""
    tables: dict[int, list[int]] = {}
    all_tables, free = [], []
    for step in events.steps:
        for s in (*step["released"], *step["preempted"]):
            tables.pop(s, None)
        for s, first, blocks in step["tables"]:
            tables[s] = [*tables.get(s, [])[:first], *blocks]
        all_tables.append({s: list(blocks) for s, blocks in tables.items()})
        free.append(step["free_blocks"])
    return all_tables, free


def _spans(tables: Sequence[dict[int, list[int]]]) -> list[list[tuple[str, int, int]]]:
    """For each block who owned it, in steps [begin, end)."""
    spans: list[list[tuple[str, int, int]]] = [[] for _ in range(NUM_BLOCKS)]
    for number, owned in enumerate(tables):
        for s, blocks in owned.items():
            for b in blocks:
                if spans[b] and spans[b][-1][0] == NAMES[s] and spans[b][-1][2] == number:
                    spans[b][-1] = NAMES[s], spans[b][-1][1], number + 1
                else:
                    spans[b].append((NAMES[s], number, number + 1))
    return spans


def _holes() -> tuple[int, int, float]:
    """First fit in one memory: requests that found no place, those of them for which enough was free in sum,
    and which share of the memory that was."""
    draw = random.Random(0)
    size, requests = 2000, 20_000
    pieces: list[tuple[int, int]] = []  # [begin, end), in order
    refused = in_sum = empty = 0
    for _ in range(requests):
        wanted = draw.randint(1, 200)
        edges = [0, *(edge for piece in pieces for edge in piece), size]
        gaps = list(zip(edges[::2], edges[1::2], strict=True))
        place = next((begin for begin, end in gaps if end - begin >= wanted), None)
        if place is not None:
            pieces = sorted([*pieces, (place, place + wanted)])
        else:
            refused += 1
            free = sum(end - begin for begin, end in gaps)
            if free >= wanted:
                in_sum += 1
                empty += free
            pieces.pop(draw.randrange(len(pieces)))  # somebody ends
    return refused, in_sum, empty / in_sum / size


def _attention_errors(texts: Sequence[list[int]], right: bool, device: str) -> list[float]:
    """Writes texts into a cache, at slots right or wrong, and attends through block tables."""
    model = SmallModel()
    blocks = _core.BlockAllocator(8, BLOCK_SIZE, False)
    keys = np.zeros((8, HK, BLOCK_SIZE, DH), np.float32)
    values = np.zeros_like(keys)
    tables, lasts, expected = [], [], []
    for ids in texts:
        own = blocks.allocate(-(-len(ids) // BLOCK_SIZE)) or []
        slots = [own[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE if right else p for p in range(len(ids))]
        qkv = model.qkv(ids, layer=0)
        turned, keys, values = ops.rope_and_cache(
            qkv,
            keys,
            values,
            slot_mapping=slots,
            cos_sin=model.cos_sin(range(len(ids))),
            num_heads=H,
            device=device,
        )
        lasts.append(turned[-1:])
        tables.append(own + [0] * (2 - len(own)))
        query, own_keys, own_values = model.split(model.rotated(qkv))
        expected.append(plain_attention(query[-1], own_keys, own_values).ravel())
    out = ops.paged_attention(
        np.concatenate(lasts), keys, values, block_tables=tables, context_len=[len(ids) for ids in texts],
        query_start=range(len(texts) + 1), num_heads=H, device=device,
    )  # fmt: skip
    return [float(np.abs(o - e).max() / np.abs(e).max()) for o, e in zip(out, expected, strict=True)]


def _one_by_one() -> list[str]:
    """Two prompts of six blocks in a pool of ten."""
    blocks = _core.BlockAllocator(10, BLOCK_SIZE, False)
    tables: dict[str, list[int]] = {"a": [], "b": []}
    while any(len(own) < 6 for own in tables.values()):
        taken = 0
        for own in tables.values():
            block = blocks.allocate(1) if len(own) < 6 else None
            if block:
                own += block
                taken += 1
        if not taken:
            break
    have = " and ".join(f"{name} has {len(own)} of 6" for name, own in tables.items())
    lines = [f"One by one: {have}, {blocks.free_blocks} blocks are free. Nobody can begin."]
    blocks = _core.BlockAllocator(10, BLOCK_SIZE, False)
    a, b = blocks.allocate(6), blocks.allocate(6)
    assert a is not None
    lines.append(f"All or nothing: a has {len(a)} of 6, b {'waits' if b is None else 'has them too'}.")
    blocks.release(a)
    b = blocks.allocate(6) or []
    lines.append(f"When a has ended: b has {len(b)} of 6.")
    return lines


def _random_walk(blocks: _core.BlockAllocator, calls: int) -> int:
    """Checks the laws after each call. How many allocations were refused; at the end all is given back."""
    draw = random.Random(0)
    tables: list[list[int]] = []
    refused = 0
    for _ in range(calls):
        if tables and draw.random() < 0.4:
            blocks.release(tables.pop(draw.randrange(len(tables))))
        else:
            given = blocks.allocate(draw.randint(1, 5))
            if given is None:
                refused += 1
            else:
                tables.append(given)
        owned = [block for own in tables for block in own]
        assert len(set(owned)) == len(owned) == blocks.owned_blocks
        assert blocks.free_blocks + blocks.owned_blocks == blocks.num_blocks
    for own in tables:
        blocks.release(own)
    return refused


def draw(data: Data, figure: Any) -> None:
    colours = (BLUE, ORANGE, GREEN, RED, "#805ad5", "#b7791f", "#319795", "#97266d")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, colour in zip(NAMES, colours, strict=True):
        drawn = [
            (block, begin, end)
            for block, spans in enumerate(data["blocks"])
            for who, begin, end in spans
            if who == name
        ]
        rows, begins, ends = zip(*drawn, strict=True)
        widths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        left.barh(rows, widths, left=begins, height=1, color=colour, edgecolor="white", linewidth=0.5,
                  label=name)  # fmt: skip
    left.set(title="Whose block it is", xlabel="step", ylabel="block", ylim=(NUM_BLOCKS, -1))
    left.set_xlim(0, data["steps"])
    left.legend(ncols=8, loc="lower center", handlelength=0.8, columnspacing=0.8, fontsize=9)
    reserved = {k: v for k, v in data["reserved"].items() if "longest" not in k and "256" not in k}
    names = ["prompt +\nmax_tokens", "blocks\nof 64", "blocks\nof 16", "blocks\nof 1"]
    right.bar(names, list(reserved.values()), color=GREY)
    right.bar(names, [data["used"]] * len(names), color=BLUE)
    right.set(title="Tokens set aside, and used", ylabel="tokens, all eight requests")
    right.tick_params(axis="x", labelsize=9)
