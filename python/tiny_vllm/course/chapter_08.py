"""Q, K, V and RoPE

How a place in the text becomes an angle, and a wrong rotation that passes most tests.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tiny_vllm import Engine, SamplingParams, _core
from tiny_vllm.course.lab import BLUE, GREY, ORANGE, RED, Data, say, section, table
from tiny_vllm.course.layers import SmallModel
from tiny_vllm.gguf_import import unpermute_rows

SENTENCE = "The man and the dog and the cat"
TEXT = """Bread is made from flour, water, salt and yeast. The baker mixes the flour with warm water and lets
the dough rest. The yeast eats the sugar in the flour and makes small bubbles of gas, and the dough
begins to grow. After an hour the baker folds the dough, gives it the shape of a loaf, and lets it
rest again. Then the loaf goes into a hot oven. The heat makes the gas in the bubbles expand, and
the bread rises one last time. After forty minutes the crust is brown, and the bread is ready. The
baker takes it out of the oven and lets it cool before he cuts it."""
RANGES = ((0, 1), (1, 8), (8, 32), (32, 200))
LLAMA = {  # the shape of Llama-3.2-1B
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def run(device: str) -> Data:
    model = SmallModel(device)
    ids = model.tokenizer.encode(SENTENCE)
    qkv = model.qkv(ids, 0)
    _show_shapes(model, ids, qkv)
    _show_places(model, ids, qkv)
    _show_speeds(model)
    _show_checks(model, ids, qkv)
    logprobs = _show_texts(device)
    return {**_show_ranges(), "logprobs": logprobs}


def _show_shapes(model: SmallModel, ids: list[int], qkv: Any) -> None:
    section("Three matrices, one product")
    q, k, v = model.split(qkv)
    name = "model.layers.0.self_attn.{}_proj.weight"
    rows = []
    for label, heads in (("Q", q), ("K", k), ("V", v)):
        weight = model.weight(name.format(label.lower()))
        rows.append((label, str(weight.shape), str((len(ids), weight.shape[0])), heads.shape[1]))
    shapes = str((qkv.shape[1], model.config["hidden_size"])), str(qkv.shape)
    rows.append(("qkv", *shapes, qkv.shape[1] // model.head_dim))
    table(("", "weight", "result", "heads"), rows)
    say(f"{len(ids)} tokens of {model.config['hidden_size']} numbers; a head has {model.head_dim}.")


def _show_places(model: SmallModel, ids: list[int], qkv: Any) -> None:
    section("A score without a place")
    pieces = model.pieces(ids)
    the = [i for i, piece in enumerate(pieces) if piece == " the"]
    q, k, _ = model.split(qkv)
    q_turned, k_turned, _ = model.split(model.rotated(qkv))
    head, kv_head = 1, 0
    table(
        ("score of ' cat' with", "position", "as they are", "rotated"),
        [
            (
                repr(pieces[i]),
                i,
                f"{q[-1, head] @ k[i, kv_head]:.3f}",
                f"{q_turned[-1, head] @ k_turned[i, kv_head]:.3f}",
            )
            for i in the
        ],
    )
    say(f"' cat' stands at position {len(ids) - 1}. Layer 0, query head {head}, key head {kv_head}.")


def _show_speeds(model: SmallModel) -> None:
    section("How fast the pairs turn")
    frequencies = _core.Rope(model.config).inv_freq()
    table(
        ("pair", "elements", "radians a token", "tokens for a full turn"),
        [
            (i, f"{i} and {i + 32}", f"{frequencies[i]:.3g}", f"{2 * np.pi / frequencies[i]:,.1f}")
            for i in (0, 1, 2, 8, 16, 24, 31)
        ],
    )


def _interleaved(heads: Any, cos_sin: Any) -> Any:
    """heads (T, n, Dh), cos_sin (T, Dh/2, 2): elements 2i and 2i + 1 turn together."""
    cos, sin = cos_sin[:, None, :, 0], cos_sin[:, None, :, 1]
    a, b = heads[..., 0::2], heads[..., 1::2]
    return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(heads.shape)


def _show_checks(model: SmallModel, ids: list[int], qkv: Any) -> None:
    section("Three tests that both layouts pass")
    _, k, _ = model.split(qkv)
    cat, the = len(ids) - 1, 3
    head, kv_head = 1, 0
    lines = []
    for moved in (0, 1, 50, 1000, 7000):
        positions = np.arange(len(ids)) + moved
        half_q, half_k, _ = model.split(model.rotated(qkv, positions))
        pair_q, pair_k = (_interleaved(x, model.cos_sin(positions)) for x in model.split(qkv)[:2])
        lines.append(
            (
                moved,
                f"{half_q[cat, head] @ half_k[the, kv_head]:.2f}",
                f"{pair_q[cat, head] @ pair_k[the, kv_head]:.2f}",
            )
        )
    table(("both tokens moved by", "half-split", "interleaved"), lines)
    positions = np.arange(len(ids))
    turned = (model.split(model.rotated(qkv, positions))[1], _interleaved(k, model.cos_sin(positions)))
    lengths = [
        np.abs(np.linalg.norm(x, axis=-1) / np.linalg.norm(k, axis=-1) - 1).max() < 1e-5 for x in turned
    ]
    unturned = [bool(np.array_equal(x[0], k[0])) for x in turned]
    say(
        f"The length of every key is kept: {_yes(lengths[0])}, {_yes(lengths[1])}. "
        f"At position 0 nothing is changed: {_yes(unturned[0])}, {_yes(unturned[1])}."
    )


def _yes(fact: Any) -> str:
    return "yes" if fact else "no"


@contextmanager
def _with_interleaved_rotation(folder: Path) -> Iterator[Path]:
    """The model with its query and key rows in another order.

    Rotating them half-split then turns elements 2i and 2i + 1 of the original together.
    """
    with tempfile.TemporaryDirectory(prefix="tiny-vllm-course-") as name:
        copy = Path(name)
        for file in folder.iterdir():
            if file.suffix != ".safetensors":
                os.symlink(file, copy / file.name)
        content = bytearray((folder / "model.safetensors").read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        for tensor, entry in json.loads(content[8:start]).items():
            if tensor.endswith(("q_proj.weight", "k_proj.weight")):
                begin, end = (start + offset for offset in entry["data_offsets"])
                rows = np.frombuffer(content[begin:end], np.uint16).reshape(entry["shape"])
                content[begin:end] = rows[unpermute_rows(rows.shape[0] // 64, 64)].tobytes()
        (copy / "model.safetensors").write_bytes(content)
        yield copy


def _show_texts(device: str) -> dict[str, list[float]]:
    folder = SmallModel().folder
    with _with_interleaved_rotation(folder) as wrong:
        found = {
            name: _answers(str(path), device)
            for name, path in (("half-split", folder), ("interleaved", wrong))
        }
    section("The model still talks")
    for right, wrong_text in zip(found["half-split"][0], found["interleaved"][0], strict=True):
        print(f"half-split   {right}")
        print(f"interleaved  {wrong_text}")
    section("And the test that one of them fails")
    count = len(found["half-split"][1])
    lines = []
    for begin, end in RANGES:
        end = min(end, count)
        label = str(begin) if end == begin + 1 else f"{begin} to {end - 1}"
        lines.append((label, *(f"{np.mean(logprobs[begin:end]):.1f}" for _, logprobs in found.values())))
    table(("seen from positions", *found), lines)
    say(f"The mean log-probability of the token that follows, in a text of {count + 1} tokens.")
    return {name: [round(x, 2) for x in logprobs] for name, (_, logprobs) in found.items()}


def _answers(folder: str, device: str) -> tuple[list[str], list[float]]:
    """Continuations of three prompts, and the log-probability of each token of TEXT but the first."""
    engine = Engine(folder, device=device, dtype="float32")  # so that rounding does not blur the comparison
    prompts = {
        "The capital of France is": 1,
        "The sun rises in the east and sets in": 3,
        "One, two, three, four,": 8,
    }
    greedy = [SamplingParams(temperature=0, max_tokens=n) for n in prompts.values()]
    texts = [
        prompt + engine.generate(prompt, g)[0].outputs[0].text
        for prompt, g in zip(prompts, greedy, strict=True)
    ]
    scored = engine.generate(" ".join(TEXT.split()), SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert scored.prompt_logprobs is not None
    return texts, [next(iter(entry.values())).logprob for entry in scored.prompt_logprobs[1:] if entry]


def _show_ranges() -> Data:
    section("Three ranges")
    plain = _core.Rope(_core.parse_config(json.dumps(LLAMA))).inv_freq()
    scaled = _core.Rope(_core.parse_config(json.dumps({**LLAMA, "rope_scaling": SCALING}))).inv_freq()
    lines = []
    for i in (0, 8, 14, 15, 16, 17, 18, 24, 31):
        turns = 8192 * plain[i] / (2 * np.pi)
        lines.append(
            (
                i,
                f"{2 * np.pi / plain[i]:,.0f}",
                f"{turns:,.3g}",
                f"{plain[i] / scaled[i]:.2f}",
                f"{2 * np.pi / scaled[i]:,.0f}",
            )
        )
    table(("pair", "tokens a turn", "turns in 8,192", "slowed down by", "tokens a turn then"), lines)
    kept, divided = np.count_nonzero(plain == scaled), np.count_nonzero(plain / scaled > 31.9)
    say(
        f"Of 32 pairs {kept} keep their speed, {32 - kept - divided} are in between, "
        f"{divided} turn 32 times slower."
    )
    return {
        "plain": [round(float(x), 1) for x in 2 * np.pi / plain],
        "scaled": [round(float(x), 1) for x in 2 * np.pi / scaled],
    }


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    for (name, values), color in zip(data["logprobs"].items(), (BLUE, RED), strict=True):
        mean = np.cumsum(values) / np.arange(1, len(values) + 1)
        left.plot(range(1, len(values) + 1), mean, color=color, label=name)
    left.set(
        title="A text, scored by both", xlabel="tokens seen", ylabel="mean log-probability", ylim=(-10, 0)
    )
    left.legend()
    pairs = range(len(data["plain"]))
    right.plot(pairs, data["plain"], color=GREY, marker=".", label="as trained first")
    right.plot(pairs, data["scaled"], color=ORANGE, marker=".", label="llama3, factor 32")
    for y in (2048, 8192):
        right.axhline(y, color=GREY, linewidth=0.7, linestyle=":")
        right.text(0, y * 1.15, f"{y:,}", color=GREY, fontsize=9)
    right.set(title="Llama-3.2-1B", xlabel="pair", ylabel="tokens for a full turn", yscale="log")
    right.legend(loc="lower right")
