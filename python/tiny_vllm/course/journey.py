"""A token's journey, from text to text

Follows one prompt through the engine and says what it is at each station.
"""

from __future__ import annotations

import math
from typing import Any

from tiny_vllm import Engine, SamplingParams, _core
from tiny_vllm.course.lab import BLUE, GREEN, GREY, ORANGE, Data, say, section, table

PROMPT = "The capital of France is"


def run(device: str) -> Data:
    engine = Engine(device=device, record_events=True)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=5)
    output = engine.generate(PROMPT, params)[0]
    ids = output.prompt_token_ids
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    pieces = [tokenizer.decode([i]) for i in ids]
    events = engine.events()
    steps = [step for step in events.steps if step["chunks"]]
    block_size = engine.info()["block_size"]
    (block,) = steps[0]["tables"][0][2]
    answer = output.outputs[0]
    first = (answer.logprobs or [])[0]

    section("Text becomes numbers")
    table(("piece", "id"), [(repr(piece), i) for piece, i in zip(pieces, ids, strict=True)])

    section("A step is a list of positions")
    for step, words in zip(steps, str(events).splitlines(), strict=False):
        say(words)
        for _, start, count in step["chunks"]:
            say(f"  rows: {count}; positions: [{start}, {start + count}); logits: of 1 row")

    section("Rows of the first step")
    table(
        ("row", "token id", "position", "slot in the cache", "wants logits"),
        [
            (i, token, i, f"block {block} * {block_size} + {i}", "yes" if i == len(ids) - 1 else "")
            for i, token in enumerate(ids)
        ],
    )

    section("Shapes on the way")
    info = _sizes(engine)
    table(("after", "shape"), _shapes(info, len(ids)))

    section("The choice")
    rows = sorted(first.items(), key=lambda item: item[1].rank or 0)[:5]
    table(
        ("id", "piece", "probability"),
        [(token, repr(p.decoded_token), f"{math.exp(p.logprob):.3f}") for token, p in rows],
    )
    say(f"The first is taken. One step later comes {tokenizer.decode([answer.token_ids[1]])!r}.")
    return {
        "prompt": PROMPT,
        "pieces": pieces,
        "ids": ids,
        "block": block,
        "block_size": block_size,
        "sizes": info,
        "choice": [[p.decoded_token, round(math.exp(p.logprob), 4)] for _, p in rows],
        "chosen": answer.token_ids[0],
        "text": PROMPT + answer.text,
    }


def _sizes(engine: Engine) -> dict[str, int]:
    config = _core.parse_config((engine.model_folder / "config.json").read_text(encoding="utf-8"))
    return {
        "L": config.num_layers,
        "D": config.hidden_size,
        "H": config.num_heads,
        "Hk": config.num_kv_heads,
        "Dh": config.head_dim,
        "F": config.intermediate_size,
        "V": config.vocab_size,
    }


def _shapes(s: dict[str, int], rows: int) -> list[tuple[str, str]]:
    return [
        ("embedding", f"({rows}, {s['D']})"),
        ("query, key and value of a layer", f"({rows}, {(s['H'] + 2 * s['Hk']) * s['Dh']})"),
        ("attention", f"({rows}, {s['H'] * s['Dh']})"),
        ("gate and up", f"({rows}, {2 * s['F']})"),
        ("the gate", f"({rows}, {s['F']})"),
        (f"all {s['L']} layers", f"({rows}, {s['D']})"),
        ("the row that wants logits", f"(1, {s['D']})"),
        ("logits", f"(1, {s['V']})"),
    ]


def draw(data: Data, figure: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    s, n = data["sizes"], len(data["ids"])
    first_slot = data["block"] * data["block_size"]
    slots = f"slots {first_slot} … {first_slot + n - 1}"
    ids = " · ".join(f"{piece.strip()} {i}" for piece, i in zip(data["pieces"], data["ids"], strict=True))
    best = " · ".join(f"{piece.strip()} {p:.2f}" for piece, p in data["choice"][:4])
    chosen = f"id {data['chosen']} is {data['choice'][0][0]!r}, the one row of the next step, at position {n}"
    stations = [
        (GREEN, "Text", [repr(data["prompt"])]),
        (GREEN, "Token ids (Python, tokenizer)", [ids]),
        (
            BLUE,
            "A request, admitted by the scheduler (C++)",
            [
                f"block {data['block']} of the KV cache: {data['block_size']} slots, {n} are needed now",
                f"this step computes its positions [0, {n})",
            ],
        ),
        (BLUE, "A flat batch", [f"{n} rows, positions 0 … {n - 1}, {slots}; logits wanted of row {n - 1}"]),
        (
            ORANGE,
            f"The forward pass, {s['L']} layers (CPU or GPU)",
            [
                f"embedding: ids ({n}) become rows ({n}, {s['D']}), the residual stream",
                f"norm and product: query, key, value ({n}, {(s['H'] + 2 * s['Hk']) * s['Dh']})",
                f"RoPE; keys and values go to {slots} of this layer",
                f"attention: {s['H']} heads of {s['Dh']}, {s['Hk']} of keys; product, added to the stream",
                f"norm, gate and up ({n}, {2 * s['F']}), SiLU, down; added to the stream",
                f"at the end: last row, norm, output head, logits (1, {s['V']})",
            ],
        ),
        (BLUE, "A choice", [best]),
        (
            GREEN,
            "Text again (Python, detokenizer)",
            [
                chosen,
                "until an end token, a stop string or max_tokens; then the block goes back",
            ],
        ),
    ]
    figure.set_size_inches(8, 8.5)
    axes = figure.subplots()
    axes.set(xlim=(0, 100), ylim=(0, 100))
    axes.axis("off")
    top = 99.0
    for number, (color, title, lines) in enumerate(stations, 1):
        height = 4.6 + 2.8 * len(lines)
        frame = FancyBboxPatch((4, top - height), 92, height, boxstyle="round,pad=0.4")
        frame.set(facecolor="white", edgecolor=color)
        axes.add_patch(frame)
        axes.text(6, top - 0.8, f"{number}  {title}", va="top", weight="bold", color=color)
        for i, line in enumerate(lines):
            axes.text(6, top - 4.2 - 2.8 * i, line, va="top", fontsize=10)
        top -= height
        if number < len(stations):
            arrow = {"arrowstyle": "->", "color": GREY}
            axes.annotate("", (50, top - 3.2), (50, top - 0.6), arrowprops=arrow)
        top -= 3.8
