"""Logits, argmax and sampling

What temperature and filters do to real logits, and a draw that needs no order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tiny_vllm import Engine, SamplingParams, ops
from tiny_vllm.course.chapter_12 import Model, probabilities
from tiny_vllm.course.lab import BLUE, GREEN, GREY, ORANGE, RED, Data, measured, say, section, table

Array = Any
SURE, UNSURE = "The capital of France is", "In the garden there is a"


# ---- the race, as the engine runs it


def philox(counter: Array, key: int) -> Array:
    """counter (n, 4) of 32-bit numbers -> as many random ones: cpp/sample/philox.h for many at once."""
    low = np.uint64(0xFFFFFFFF)
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            b & low,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            a & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=1).astype(np.uint32)


def scores(logits: Array, tokens: Array, top: float, temperature: float, seed: int, position: int) -> Array:
    """p / e for these tokens, whoever asks, and whatever he knows of the others but the largest logit."""
    counter = np.zeros((tokens.size, 4), np.uint32)
    counter[:, 0], counter[:, 1] = tokens // 4, position
    bits = philox(counter, seed)[np.arange(tokens.size), tokens % 4]
    e = -np.log((bits + 0.5) * 2.0**-32)  # exponentially distributed
    return np.exp((logits[tokens].astype(np.float64) - top) / temperature) / e


def race(logits: Array, parts: list[Array], temperature: float, seed: int, position: int) -> int:
    """Each part of the tokens finds its winner alone; then the winners meet."""
    top = float(logits.max())
    best, winner = -1.0, -1
    for tokens in parts:
        score = scores(logits, tokens, top, temperature, seed, position)
        if score.max() > best:
            best, winner = float(score.max()), int(tokens[score.argmax()])
    return winner


# ---- the experiment


def run(device: str) -> Data:
    model = Model(device)
    engine = Engine(device=device)
    tokenizer = engine.tokenizer
    assert tokenizer is not None

    def piece(token: int) -> str:
        return repr(tokenizer.decode([int(token)], skip_special_tokens=False))

    logits = {prompt: model.forward(tokenizer.encode(prompt)) for prompt in (SURE, UNSURE)}
    order = {prompt: np.argsort(-row, kind="stable") for prompt, row in logits.items()}

    section("Scores")
    for prompt, row in logits.items():
        p = probabilities(row)
        best = order[prompt][:4]
        say(f"{prompt!r}: {row.size} logits")
        table(
            ("token", "logit", "probability"),
            [(piece(t), measured(row[t]), measured(p[t] * 100, "%")) for t in best],
        )

    section("Temperature")
    best = order[UNSURE][:3]
    lines = []
    for temperature in (0.2, 0.5, 1.0, 2.0):
        p = probabilities(logits[UNSURE] / temperature)
        shares = [*p[best], 1 - p[best].sum()]
        lines.append((temperature, *(measured(100 * share, "%") for share in shares)))
    table(("temperature", *map(piece, best), "the other 49149"), lines)

    section("How many are kept")
    kept = {}
    for prompt in (SURE, UNSURE):
        p = probabilities(logits[prompt])[order[prompt]]
        kept[prompt] = (40, int((np.cumsum(p) < 0.9).sum()) + 1, int((p >= 0.05 * p[0]).sum()))
    table(
        ("", "top_k=40", "top_p=0.9", "min_p=0.05"),
        [(prompt, k, measured(n), measured(m)) for prompt, (k, n, m) in kept.items()],
    )

    section("The end of a sum")
    _the_end_of_a_sum(logits[SURE], piece)

    section("Any order")
    row = np.ascontiguousarray(logits[UNSURE])
    _any_order(row, device)

    section("Twenty thousand draws")
    best = order[UNSURE][:10]
    draws = 20_000
    drawn = ops.sample(np.tile(row[best], (draws, 1)), seeds=13, positions=np.arange(draws), device=device)
    counts = np.bincount(drawn, minlength=10)
    expected = probabilities(row[best]) * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    table(
        ("token", "expected", "drawn"),
        [(piece(t), measured(e), measured(int(c))) for t, e, c in zip(best, expected, counts, strict=True)],
    )
    say(
        f"Chi-square: {measured(chi_square)}. It would be above 27.9 once in a thousand such experiments; "
        f"here it is {'below' if chi_square < 27.9 else 'above'}."
    )

    section("Whose random numbers")
    _whose_numbers(engine)
    return {
        "probabilities": {
            prompt: [float(f"{x:.3g}") for x in probabilities(logits[prompt])[order[prompt]][_places()]]
            for prompt in (SURE, UNSURE)
        },
        "kept": {prompt: list(counts) for prompt, counts in kept.items()},
        "tokens": [tokenizer.decode([int(t)]) for t in best],
        "expected": [round(float(e), 1) for e in expected],
        "drawn": counts.tolist(),
    }


def _the_end_of_a_sum(logits: Array, piece: Any) -> None:
    """What is wrong with adding probabilities up until the sum passes a random number."""
    weights = np.exp(logits - logits.max())
    p = weights / weights.sum()
    sums = np.cumsum(p)
    assert sums.dtype == np.float32
    beyond = int(
        (1 - float(sums[-1])) * 2**24
    )  # of the numbers k / 2²⁴, which is what float32 generators give
    say(f"Probabilities in float32, one by one: the last sum is {measured(float(sums[-1]), digits=6)}.")
    small = int((p < 2.0**-25).sum())
    together = measured(float(p[p < 2.0**-25].sum()))
    say(f"{measured(small)} tokens have less than 2^-25 each, and {together} together.")
    say(f"One random number in {measured(2**24 / beyond)} is larger. No token is found for it.")
    p[np.argsort(-logits, kind="stable")[40:]] = 0
    found = int(np.searchsorted(np.cumsum(p), np.float32(0)))
    say(f"With top_k = 40, the random number 0 finds {piece(found)}, with probability {p[found]:g}.")


def _any_order(logits: Array, device: str) -> None:
    draws, temperature, seed = 50, 1.0, 7
    tokens = np.arange(logits.size)
    backwards = [tokens[::-1]]
    shuffled = np.array_split(np.random.default_rng(0).permutation(tokens), 7)
    engine = ops.sample(np.tile(logits, (draws, 1)), seeds=seed, positions=np.arange(draws), device=device)
    lines = []
    for name, parts in (
        ("one after the other", [tokens]),
        ("backwards", backwards),
        ("shuffled, in 7 parts", shuffled),
    ):
        found = [race(logits, parts, temperature, seed, position) for position in range(draws)]
        p = probabilities(logits)[np.concatenate(parts)]
        in_order = np.concatenate(parts)[
            np.searchsorted(np.cumsum(p) / p.sum(), (np.arange(draws) + 0.5) / draws)
        ]
        if name == "one after the other":
            first = in_order
        lines.append((name, int((np.array(found) == engine).sum()), measured(int((in_order == first).sum()))))
    table((f"of {draws} draws, in this order", "race: as the engine", "sum: as the first line"), lines)


def _whose_numbers(engine: Engine) -> None:
    prompt, others = "Once upon a time", ["My dog", "In the year 2050", "The sea"]

    def params(**more: Any) -> SamplingParams:
        return SamplingParams(**({"temperature": 1.0, "max_tokens": 12, "seed": 5} | more))

    alone = engine.generate(prompt, params())[0].outputs[0].token_ids
    crowd = engine.generate([*others, prompt], [params(seed=s) for s in (1, 2, 3)] + [params()])[-1]
    three = engine.generate(prompt, params(n=3))[0].outputs
    unlike = engine.generate([prompt, prompt], params(seed=None))

    # What happens with one generator for all, which each draw moves on.
    def shared(neighbours: int) -> list[float]:
        generator = np.random.default_rng(5)
        mine = []
        for _ in range(12):
            mine.append(float(generator.random()))
            generator.random(neighbours)
        return mine

    table(
        ("", "the same tokens"),
        [
            ("seed 5, alone and among three others", _yes(alone == crowd.outputs[0].token_ids)),
            ("seed 5, n = 3: first and alone", _yes(three[0].token_ids == alone)),
            ("seed 5, n = 3: first and second", _yes(three[0].token_ids == three[1].token_ids)),
            ("no seed, two requests", _yes(unlike[0].outputs[0].token_ids == unlike[1].outputs[0].token_ids)),
        ],
    )
    same = sum(a == b for a, b in zip(shared(0), shared(3), strict=True))
    say(f"One generator for all: of 12 random numbers, {same} is the same with three neighbours as alone.")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _places() -> list[int]:
    """Ranks that are evenly spread on a logarithmic axis, from 0."""
    return sorted({int(np.rint(10**x)) - 1 for x in np.linspace(0, np.log10(49152), 80)})


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    ranks = np.array(_places()) + 1
    for prompt, colour in ((SURE, GREY), (UNSURE, BLUE)):
        p = np.array(data["probabilities"][prompt])
        left.plot(ranks, p, color=colour, label=f"{prompt} …")
        for count, cut in zip(data["kept"][prompt], (RED, GREEN, ORANGE), strict=True):
            left.plot([count], [np.interp(count, ranks, p)], "o", color=cut)
    for name, cut in (("top_k = 40", RED), ("top_p = 0.9", GREEN), ("min_p = 0.05", ORANGE)):
        left.plot([], [], "o", color=cut, label=name)
    left.set(xscale="log", yscale="log", xlabel="rank of the token", ylabel="probability", ylim=(1e-12, 2))
    left.set_title("The last token that is kept")
    left.legend(fontsize=9, loc="lower left")
    place = np.arange(len(data["tokens"]))
    right.barh(-place, data["drawn"], color=BLUE, height=0.7, label="drawn")
    right.plot(
        data["expected"], -place, "|", color=ORANGE, markersize=14, markeredgewidth=2, label="expected"
    )
    right.set_yticks(-place, [t.strip() for t in data["tokens"]])
    right.set(title="20,000 draws of ten tokens", xlabel="how often")
    right.legend()
