"""Introduction

What goes into a model and what comes out, the loop around it, and what a reader waits for.
"""

from __future__ import annotations

import math
from typing import Any

from tiny_vllm import Engine, RequestOutput, SamplingParams, _core
from tiny_vllm.bundled import NAME, bundled_model_folder
from tiny_vllm.course.lab import BLUE, GREY, Data, measured, say, section, table

PROMPT = "The capital of France is"
ROUNDS = 9


def run(device: str) -> Data:
    # float32, so that the scores are the same on every machine to the digits we print (chapter 2).
    engine = Engine(
        device=device, dtype="float32", kv_cache_memory_bytes=32_000_000, enable_prefix_caching=False
    )
    tokenizer = engine.tokenizer
    assert tokenizer is not None

    section("Text as numbers")
    prompt = tokenizer.encode(PROMPT)
    table(("id", "piece of text"), [(i, repr(tokenizer.decode([i]))) for i in prompt])

    section("Scores of the next token")
    likeliest = scores(engine, prompt)
    table(("id", "piece of text", "share"), [(i, repr(t), f"{p:.0%}") for i, t, p in likeliest[:5]])

    section("The loop")
    rounds, ids = [], list(prompt)
    for _ in range(ROUNDS):
        best = scores(engine, ids)
        rounds.append(best[:2])
        ids.append(best[0][0])  # choose the likeliest, append it
    chosen = [best[0] for best in rounds]
    table(
        ("round", "ids in", "id out", "piece of text"),
        [(n + 1, len(prompt) + n, i, repr(text)) for n, (i, text, _) in enumerate(chosen)],
    )
    greedy = SamplingParams(temperature=0, max_tokens=ROUNDS)
    answer = engine.generate(PROMPT, greedy)[0].outputs[0]
    same = answer.token_ids == ids[len(prompt) :]
    say(f"engine.generate says {answer.text!r}, {'the same ids' if same else 'OTHER IDS'}.")

    section("Without the prompt")
    without = scores(engine, prompt)[:1]
    while len(without) < ROUNDS:
        without.append(scores(engine, [i for i, _, _ in without])[0])
    say("The first id comes from the prompt, the others from the answer alone:")
    say(f"{_joined(without)!r}")

    section("The small model")
    config = _core.parse_config((bundled_model_folder() / "config.json").read_text())
    table(
        ("letter", "counts", NAME),
        [
            ("V", "tokens in the vocabulary", config.vocab_size),
            ("D", "numbers in the row of a token (hidden size)", config.hidden_size),
            ("L", "layers", config.num_layers),
            ("H", "query heads of a layer", config.num_heads),
            ("Hk", "key and value heads of a layer", config.num_kv_heads),
            ("Dh", "numbers in a head", config.head_dim),
            ("F", "numbers in the middle of a layer's MLP", config.intermediate_size),
        ],
    )
    weights = _core.Checkpoint(str(bundled_model_folder())).nbytes
    say(f"Its weights are {weights // 2:,} numbers of 2 bytes: {weights / 1e6:.0f} MB.")

    del engine
    section("What a reader waits for")
    engine = Engine(device=device, kv_cache_memory_bytes=64_000_000, enable_prefix_caching=False)
    long_prompt = tokenizer.encode("One token after the other. " * 60)[:300]
    params = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True)
    engine.generate({"prompt_token_ids": prompt}, params)  # the first run of anything is slower
    runs = [_times(engine.generate({"prompt_token_ids": long_prompt}, params)[0]) for _ in range(3)]
    first, each = min(run[0] for run in runs), min(run[1] for run in runs)  # the least disturbed
    say(f"A prompt of {len(long_prompt)} tokens and {params.max_tokens} tokens of answer:")
    table(
        ("", "time"),
        [
            ("until the first token", measured(first * 1e3, "ms")),
            ("from each token to the next", measured(each * 1e3, "ms")),
            ("until the last", measured((first + 32 * each) * 1e3, "ms")),
            ("33 times the first (wrong)", measured(33 * first * 1e3, "ms")),
        ],
    )
    read = measured(weights / each / 1e9, "GB/s")
    say(f"Between two tokens all weights are read once: {weights / 1e6:.0f} MB, {read}.")
    if device == "cpu":
        say(f"Reading memory and doing nothing with it: {measured(_core.measure_read_bandwidth(), 'GB/s')}.")

    section("One reader and eight")
    lines = []
    for readers in (1, 8):
        runs = [_times(out) for out in engine.generate([{"prompt_token_ids": prompt}] * readers, params)]
        each = sum(run[1] for run in runs) / readers
        lines.append((readers, measured(each * 1e3, "ms"), measured(readers / each, "tokens/s")))
    table(("readers", "from token to token", "all together"), lines)
    return {
        "prompt": PROMPT,
        "rounds": [[[text, round(share, 3)] for _, text, share in best] for best in rounds],
    }


def scores(engine: Engine, ids: list[int]) -> list[tuple[int, str, float]]:
    """One pass through the model: the five likeliest tokens after these, as (id, text, share)."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    token = engine.generate({"prompt_token_ids": ids}, params)[0].outputs[0].logprobs or []
    best = sorted(token[0].items(), key=lambda item: item[1].rank)
    return [(i, found.decoded_token or "", math.exp(found.logprob)) for i, found in best]


def _joined(chosen: list[tuple[int, str, float]]) -> str:
    return "".join(text for _, text, _ in chosen)


def _times(out: RequestOutput) -> tuple[float, float]:
    """Seconds until the first token, and from each to the next."""
    times = out.metrics
    assert times is not None
    assert times.first_token_time is not None
    assert times.finished_time is not None
    later = len(out.outputs[0].token_ids) - 1
    return (
        times.first_token_time - times.arrival_time,
        (times.finished_time - times.first_token_time) / later,
    )


def draw(data: Data, figure: Any) -> None:
    axes = figure.subplots()
    rounds = data["rounds"]
    for i, ((chosen, share), (other, other_share)) in enumerate(rounds):
        axes.bar(i - 0.2, 100 * share, 0.38, color=BLUE, label="chosen" if i == 0 else None)
        axes.bar(i + 0.2, 100 * other_share, 0.38, color=GREY, label="second" if i == 0 else None)
        for x, text, height in ((i - 0.2, chosen, share), (i + 0.2, other, other_share)):
            shown = text.replace("\n", "\\n").replace(" ", "␣")
            axes.text(x, 100 * height + 1, shown, ha="center", va="bottom", rotation=45, fontsize=9)
    axes.set(
        title=f"After “{data['prompt']}”: the two likeliest tokens of each round",
        xlabel="round of the loop",
        ylabel="share (%)",
        ylim=(0, 100),
        xticks=range(len(rounds)),
        xticklabels=range(1, len(rounds) + 1),
    )
    axes.legend()
