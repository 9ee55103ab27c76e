"""Attention, causal mask, GQA

What one head of a real layer looks at, and three mistakes that keep every shape right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tiny_vllm.course.lab import BLUE, Data, say, section, table
from tiny_vllm.course.layers import SmallModel

SENTENCE = "The cat sat on the mat because it was tired."
NOUN_LAYER, NOUN_HEAD = 13, 8  # looks from a pronoun to its noun
BEFORE_LAYER, BEFORE_HEAD = 16, 0  # looks at the token before


def run(device: str) -> Data:
    model = SmallModel(device)
    ids = model.tokenizer.encode(SENTENCE)
    pieces = model.pieces(ids)
    noun = model.rotated(model.qkv(ids, NOUN_LAYER))
    before = model.rotated(model.qkv(ids, BEFORE_LAYER))

    _show_one_row(model, noun, pieces)
    _show_scale(model, noun, before)
    _show_agreement(model, ids, noun)
    _show_leaks(model, noun)
    _show_groups(model, noun)
    return {
        "pieces": pieces,
        "noun": _rounded(_weights(model, noun)[NOUN_HEAD]),
        "before": _rounded(_weights(model, before)[BEFORE_HEAD]),
    }


def softmax(scores: Any) -> Any:
    """Along the last axis. Chapter 10 is about the subtraction."""
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def scores_of(model: SmallModel, rotated: Any) -> Any:
    """(H, T, T): each query with each key, also with those of the future."""
    q, k, _ = model.split(rotated.astype(np.float64))
    group = model.heads // model.kv_heads
    return np.stack([q[:, h] @ k[:, h // group].T for h in range(model.heads)]) / np.sqrt(model.head_dim)


def attend(model: SmallModel, rotated: Any, weights: Any) -> Any:
    """(T, H·Dh): the weighted mean of the values."""
    values = model.split(rotated.astype(np.float64))[2]
    group = model.heads // model.kv_heads
    return np.concatenate([weights[h] @ values[:, h // group] for h in range(model.heads)], axis=1)


def _hidden(rows: int) -> Any:
    """(T, T): True where the key stands after the query."""
    return np.triu(np.ones((rows, rows), bool), 1)


def _weights(model: SmallModel, rotated: Any) -> Any:
    scores = scores_of(model, rotated)
    return softmax(np.where(_hidden(scores.shape[1]), -np.inf, scores))


def _rounded(weights: Any) -> list[list[float]]:
    return [[round(float(w), 3) for w in row] for row in weights]


def _show_one_row(model: SmallModel, rotated: Any, pieces: list[str]) -> None:
    section("What ' it' looks at")
    it = pieces.index(" it")
    scores = scores_of(model, rotated)[NOUN_HEAD, it, : it + 1]
    e = np.exp(scores)
    table(
        ("key", "score", "e^score", "weight"),
        [
            (repr(p), f"{s:.2f}", f"{x:.1f}", f"{x / e.sum():.3f}")
            for p, s, x in zip(pieces, scores, e, strict=False)
        ],
    )
    say(f"The sum of the third column is {e.sum():.1f}. Layer {NOUN_LAYER}, head {NOUN_HEAD}.")


def _show_scale(model: SmallModel, noun: Any, before: Any) -> None:
    section("Without the square root")
    rows = []
    for layer, rotated in ((NOUN_LAYER, noun), (BEFORE_LAYER, before)):
        scores = scores_of(model, rotated)
        hidden = _hidden(scores.shape[1])
        for divisor, factor in (("8", 1.0), ("1", 8.0)):
            masked = np.where(hidden, -np.inf, scores * factor)
            largest = softmax(masked)[:, 1:].max(axis=-1)  # row 0 has one key, and no choice
            certain = np.mean(largest > 0.99)
            rows.append((layer, divisor, f"{np.max(masked):.1f}", f"{largest.mean():.2f}", f"{certain:.0%}"))
    table(("layer", "divided by", "largest score", "mean of largest weights", "rows above 0.99"), rows)


def _show_agreement(model: SmallModel, ids: list[int], rotated: Any) -> None:
    section("By hand and by the engine")
    mine = attend(model, rotated, _weights(model, rotated))
    theirs = model.attention(rotated)
    say(
        f"{len(ids)} rows of {theirs.shape[1]} numbers. "
        f"They agree to {_digits(mine, theirs)} decimal places, and the largest is {np.abs(mine).max():.1f}."
    )


def _digits(a: Any, b: Any) -> int:
    return min(4, int(-np.log10(2 * np.abs(a - b).max())))


def _show_leaks(model: SmallModel, rotated: Any) -> None:
    section("Who knows the last token")
    other = rotated.copy()
    other[-1] = rotated[1]  # another token in the last place: its query, key and value
    variants: dict[str, Callable[[Any, Any], Any]] = {
        "score -inf": lambda s, hidden: softmax(np.where(hidden, -np.inf, s)),
        "score 0": lambda s, hidden: softmax(np.where(hidden, 0, s)),
        "weight 0 afterwards": lambda s, hidden: np.where(hidden, 0, softmax(s)),
        "no mask": lambda s, hidden: softmax(s),
    }
    rows = []
    for name, weights_of in variants.items():
        hidden = _hidden(rotated.shape[0])
        results, sums = [], []
        for qkv in (rotated, other):
            weights = weights_of(scores_of(model, qkv), hidden)
            results.append(attend(model, qkv, weights))
            sums.append(weights[:, :-1].sum(axis=-1).min())
        change = np.abs(results[0] - results[1]).max(axis=1)[:-1]
        future = np.where(hidden, weights_of(scores_of(model, rotated), hidden), 0).sum(axis=-1)[:, 1].mean()
        rows.append(
            (name, f"{np.count_nonzero(change)} of {change.size}", f"{future:.0%}", f"{min(sums):.2f}")
        )
    table(("future keys get", "rows changed", "weight of the future, row 1", "smallest sum of weights"), rows)


def _show_groups(model: SmallModel, rotated: Any) -> None:
    section("Which key head")
    theirs = model.attention(rotated)
    q, k, v = model.split(rotated.astype(np.float64))
    group = model.heads // model.kv_heads
    hidden = _hidden(rotated.shape[0])
    rows = []
    rules: dict[str, Callable[[int], int]] = {
        "h / 3": lambda h: h // group,
        "h % 3": lambda h: h % model.kv_heads,
    }
    for name, kv_head in rules.items():
        out = []
        for h in range(model.heads):
            scores = q[:, h] @ k[:, kv_head(h)].T / np.sqrt(model.head_dim)
            out.append(softmax(np.where(hidden, -np.inf, scores)) @ v[:, kv_head(h)])
        error = np.abs(np.concatenate(out, axis=1) - theirs).reshape(-1, model.heads, model.head_dim)
        wrong = [h for h in range(model.heads) if error[:, h].max() > 1e-3]
        heads = " ".join(str(kv_head(h)) for h in range(model.heads))
        rows.append((name, heads, ", ".join(map(str, wrong)) or "none"))
    table(("rule", "key head of query heads 0 to 8", "heads that differ from the engine's"), rows)
    config = model.config
    per_token = 2 * config["num_layers"] * model.head_dim * 2  # keys and values, bfloat16
    say(
        f"Keys and values of a token, all {config['num_layers']} layers, in bfloat16: "
        f"{per_token * model.kv_heads:,} bytes with {model.kv_heads} heads, "
        f"{per_token * model.heads:,} with {model.heads}."
    )


def draw(data: Data, figure: Any) -> None:
    pieces = [piece.strip() for piece in data["pieces"]]
    titles = (
        ("noun", f"layer {NOUN_LAYER}, head {NOUN_HEAD}"),
        ("before", f"layer {BEFORE_LAYER}, head {BEFORE_HEAD}"),
    )
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shades", ["white", BLUE])
    places = range(len(pieces))
    for axes, (name, title) in zip(figure.subplots(1, 2), titles, strict=True):
        weights = np.ma.masked_less(np.array(data[name]), 0.005)
        mesh = axes.pcolormesh(places, places, weights, cmap=shades, vmin=0, vmax=1, rasterized=True)
        axes.set(title=title, xlabel="key", ylabel="query")
        axes.set_xticks(places, pieces, rotation=90)
        axes.set_yticks(places, pieces)
        axes.invert_yaxis()
    figure.colorbar(mesh, ax=figure.axes, label="weight", shrink=0.8).solids.set_rasterized(True)
