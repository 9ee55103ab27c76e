"""Prefix caching, copy-on-write, preemption

What the cache finds again, who may write to a block that others read, and what happens when no block is left.
"""

from __future__ import annotations

import re
from typing import Any

from tiny_vllm import Engine, SamplingParams, _core
from tiny_vllm.course.lab import BLUE, GREY, ORANGE, RED, Data, measured, say, section, table
from tiny_vllm.course.layers import SmallModel

BLOCK_BYTES = 16 * 23_040  # of the small model
DOCUMENT = "The cat sat on the mat and looked at the bird outside of the window. " * 20
PROMPTS = {
    "a": "The capital of France is",
    "b": "Once upon a time",
    "c": "The three primary colors are",
    "d": "def fibonacci(n):",
}


def run(device: str) -> Data:
    section("The second question")
    roomy = engine = _engine(device, 128)
    lines: list[tuple[Any, ...]] = []
    for beginning, question in (
        ("", "What did the cat look at?"),
        ("", "Where did the cat sit?"),
        ("Please read this. ", "Where did the cat sit?"),
    ):
        prompt = beginning + DOCUMENT + question
        out = engine.chat([{"role": "user", "content": prompt}], _greedy(8))[0]
        steps = engine.events().steps
        sequence = len(lines)
        mine = [step for step in steps if any(s == sequence for s, _, _ in step["chunks"])]
        seconds = next(step for step in mine if step["sampled"])["times"][3] - mine[0]["times"][0]
        tokens = len(out.prompt_token_ids)
        cached = out.num_cached_tokens or 0
        lines.append((beginning + question, tokens, cached, tokens - cached, measured(1e3 * seconds, "ms")))
    table(("the document, and", "tokens", "found", "computed", "first token after"), lines)

    section("Three at once")
    engine = _engine(device, 128, budget=128)
    for name, question in (
        ("a", "What did it look at?"),
        ("b", "Where did it sit?"),
        ("c", "Who sat there?"),
    ):
        engine.add_request(name, DOCUMENT + question, _greedy(1))
    while engine.has_unfinished_requests():
        engine.step()
    for line in str(engine.events()).splitlines()[:4]:
        print(line)
    metrics = engine.metrics()
    say(
        f"The prompts have {metrics['num_prompt_tokens']} tokens, of which "
        f"{metrics['num_computed_tokens']} were computed."
    )

    section("What a block is known by")
    blocks = _core.BlockAllocator(8, 4)
    texts = (
        "the cat sat on the mat and saw a",
        "the cat sat on the mat and left a",
        "the dog sat on the mat and saw a",
        "so the cat sat on the mat and saw",
        "the cat sat on the",
        "the cat sat on",
    )
    first = texts[0]
    _fill(blocks, first)
    rows: list[tuple[Any, ...]] = []
    for text in texts:
        found = blocks.find_prefix(_ids(text), max_tokens=len(text.split()) - 1)
        rows.append((text, len(found), len(found) * 4))
    table(("text", "blocks found", "words"), rows)
    say(f"Blocks of 4 words; the cache holds {first!r}. The last word is always computed.")

    section("A block that is not full")
    slots = ["the", "cat", "sat", "", "", "", "", ""]  # a's block is slots 0 to 3
    print("a has computed:  the cat sat _    and its block can be found")
    print("b asks for:      the cat sat      and is given a's block")
    slots[3] = "here"
    print("a goes on:       the cat sat here")
    slots[3] = "down"
    print("b goes on:       the cat sat down")
    print(f"a reads:         {' '.join(slots[:4])}")

    section("Forks")
    rows = []
    for tokens in (24, 32, 100):
        owned, copies = _forks(roomy, tokens, 4)
        rows.append((tokens, copies, owned, 4 * -(-(tokens + 8) // 16)))
    table(("tokens of the prompt", "copies", "blocks owned at most", "of four separate requests"), rows)
    say("One request with n = 4 and 8 new tokens each. Blocks of 16 tokens.")

    section("Too late")
    for order in ("copy, then write", "write, then copy"):
        cache = {0: ["we", "went", "to", ""], 1: [""] * 4}
        parent, child = [0], [0]
        if order == "copy, then write":
            cache[1] = list(cache[0])
            child = [1]
            cache[child[0]][3] = "school"
        else:
            cache[child[0]][3] = "school"
            cache[1] = list(cache[0])
            child = [1]
        print(
            f"{order}: the child reads {' '.join(cache[child[0]])!r}, the parent {_shown(cache[parent[0]])}"
        )

    section("Not enough blocks")
    rows = []
    texts_of: list[list[str]] = []
    figure: Data = {}
    for num_blocks in (12, 8, 6):
        engine = _engine(device, num_blocks)
        texts_now, needed = _answers(engine, 40)
        texts_of.append(texts_now)
        metrics = engine.metrics()
        computed = metrics["num_computed_tokens"]
        same = "yes" if texts_now == texts_of[0] else "no"
        rows.append(
            (num_blocks, metrics["num_steps"], metrics["num_preemptions"], computed, computed - needed, same)
        )
        if num_blocks == 8:
            figure = _figure(engine.events(), num_blocks)
            words = [
                line
                for line in str(engine.events()).splitlines()
                if re.search("preempted|found|cached|admitted", line)
            ]
    table(("blocks", "steps", "preemptions", "tokens computed", "again", "same text"), rows)
    say("With 8 blocks:")
    for line in words:
        print(line)

    section("Which block goes first")
    rows = []
    for order in ("tail before head", "head before tail"):
        blocks = _core.BlockAllocator(6, 4)
        kept = _fill(blocks, "one two three four five six seven eight nine ten eleven twelve thirteen")
        for block in reversed(kept) if order == "tail before head" else kept:
            blocks.release([block])
        taken = blocks.allocate(4)  # three are free, one must be evicted
        assert taken is not None
        words_13 = _ids("one two three four five six seven eight nine ten eleven twelve thirteen")
        rows.append((order, blocks.stats["evictions"], len(blocks.find_prefix(words_13))))
    table(("released", "evicted", "blocks still found"), rows)
    say("A text of three full blocks was released, and somebody took one of them.")
    return figure


def _engine(device: str, num_blocks: int, budget: int = 512) -> Engine:
    return Engine(
        device=device,
        kv_cache_memory_bytes=num_blocks * BLOCK_BYTES,
        max_model_len=num_blocks * 16,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        enforce_eager=True,
        record_events=True,
    )


def _greedy(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, n=n)


WORDS: dict[str, int] = {}


def _ids(text: str) -> list[int]:
    """A number for each word."""
    return [WORDS.setdefault(word, len(WORDS)) for word in text.split()]


def _fill(blocks: _core.BlockAllocator, text: str) -> list[int]:
    """Computes a text, as it were: takes blocks for it and makes them findable."""
    ids = _ids(text)
    kept = blocks.allocate(-(-len(ids) // blocks.block_size))
    assert kept is not None
    blocks.register_blocks(kept, ids)
    return kept


def _shown(words: list[str]) -> str:
    return repr(" ".join(word or "_" for word in words))


def _forks(engine: Engine, num_tokens: int, n: int) -> tuple[int, int]:
    """The most blocks that were owned, and how many were copied."""
    before = len(engine.events().steps)
    params = SamplingParams(temperature=1, seed=5, max_tokens=8, ignore_eos=True, n=n)
    prompt = SmallModel().tokenizer.encode(DOCUMENT)[
        num_tokens : 2 * num_tokens
    ]  # which nobody has left in the cache
    engine.add_request("forked", prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
    steps = engine.events().steps[before:]
    num_blocks = engine.events().engine["num_blocks"]
    owned = max(num_blocks - step["free_blocks"] for step in steps)
    return owned, sum(len(step["copies"]) for step in steps)


def _answers(engine: Engine, max_tokens: int) -> tuple[list[str], int]:
    """The texts of the four requests, and how many tokens had to be computed for them at least."""
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, _greedy(max_tokens))
    texts, needed = {}, 0
    while engine.has_unfinished_requests():
        for out in engine.step():
            if out.finished:
                texts[out.request_id] = out.outputs[0].text
                needed += len(out.prompt_token_ids) + max_tokens - 1  # the last one is not computed
    return [texts[name] for name in PROMPTS], needed


def _figure(events: Any, num_blocks: int) -> Data:
    """Blocks by state after each step's scheduling, and what happened to whom."""
    names = list(PROMPTS)
    return {
        "num_blocks": num_blocks,
        "owned": [num_blocks - step["free_blocks"] for step in events.steps],
        "cached": [step["cached_blocks"] for step in events.steps],
        "preempted": [
            (number, names[s]) for number, step in enumerate(events.steps, 1) for s in step["preempted"]
        ],
        "admitted": [
            (number, names[s], cached)
            for number, step in enumerate(events.steps, 1)
            for s, cached in step["admitted"]
            if number > 1
        ],
    }


def draw(data: Data, figure: Any) -> None:
    axes = figure.subplots()
    steps = range(1, len(data["owned"]) + 1)
    owned, cached = data["owned"], data["cached"]
    both = [o + c for o, c in zip(owned, cached, strict=True)]
    axes.fill_between(steps, owned, step="mid", color=BLUE, linewidth=0, label="owned")
    axes.fill_between(steps, owned, both, step="mid", color=ORANGE, linewidth=0, label="cached")
    axes.fill_between(steps, both, data["num_blocks"], step="mid", color="#e2e8f0", linewidth=0, label="free")
    top = data["num_blocks"]
    for i, (number, name) in enumerate(data["preempted"]):
        axes.axvline(number, color=RED)
        side = "left" if i % 2 else "right"
        axes.text(number, top + 0.15, f" {name} preempted ", color=RED, ha=side, fontsize=9)
    for number in sorted({number for number, _, _ in data["admitted"]}):
        axes.axvline(number, color=GREY, linestyle="--")
        who = " and ".join(name for step, name, _ in data["admitted"] if step == number)
        axes.text(number, top + 0.15, f" {who} again", color=GREY, ha="left", fontsize=9)
    axes.set(
        xlabel="step", ylabel="blocks", xlim=(1, len(owned)), ylim=(0, top + 1), yticks=range(0, top + 1, 2)
    )
    figure.legend(loc="outside lower center", ncols=3)
