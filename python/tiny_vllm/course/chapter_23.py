"""Where to go next

The arithmetic of what this engine does not do yet, on its own shapes: several GPUs, smaller weights, guessed
tokens, a smaller cache. What can be measured with the small model is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiny_vllm import Engine, SamplingParams, _core, ops
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.course.lab import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Data,
    read_report,
    say,
    section,
    table,
)
from tiny_vllm.tokenizer import Tokenizer

Array = npt.NDArray[Any]

LINK_US = 10.0  # assumed: what one sum over several GPUs takes when the data are few
PROMPTS = {
    "a story": "Once upon a time",
    "a copy": "Text: The tide comes in twice a day, and the boats wait for it.\nCopy: The tide comes",
    "code": "def fibonacci(n):",
    "a list": "1. apple\n2. banana\n3. cherry\n4.",
}
NEW_TOKENS = 64
KV_LAYER = 5
DRAFT = 4
SAMPLE = (
    "A language model gives each token of its vocabulary a score. The engine reads all weights once for "
    "each step, and the memory decides how fast that is. When the weights are stored in fewer bits, a "
    "step takes less time, but each weight is a little wrong, and so are the scores. How much is lost "
    "must be measured on real text."
)


def run(device: str) -> Data:
    _several_gpus()
    _fewer_bits()
    ids = Tokenizer.from_folder(bundled_model_folder()).encode(SAMPLE)
    scores = _scores(ids, device)
    acceptance = _guessed_tokens(device)
    _smaller_cache(ids)
    return {"acceptance": acceptance, "scores": scores}


# ---- tensor parallelism


def _several_gpus() -> None:
    ceilings = read_report("cuda_kernels")["ceilings"]
    layers, dim, weights = 16, 2048, 2.47e9
    lines = []
    for gpus in (1, 2, 4, 8):
        read_us = weights / gpus / ceilings["read_gb_s"] / 1e3
        sums = 2 * layers if gpus > 1 else 0
        # In a ring, each GPU sends its share of the row 2 (n - 1) times.
        sent = sums * 2 * (gpus - 1) / gpus * dim * 2
        lines.append(
            (
                gpus,
                f"{weights / gpus / 1e9:.2f} GB",
                f"{read_us:.0f} µs",
                sums,
                f"{sent / 1e3:.0f} KB",
                f"{read_us + sums * LINK_US:.0f} µs",
            )
        )
    section("Several GPUs")
    table(("GPUs", "weights on each", "to read them", "sums a step", "sent by each", "with the sums"), lines)
    say(
        f"The 1B shape, one request, {ceilings['read_gb_s']:,.0f} GB/s on each GPU; a sum is assumed to take "
        f"{LINK_US:.0f} µs."
    )


# ---- quantised weights


def quantised(weight: Array, bits: int, group: int) -> Array:
    """weight (N, K), rounded to whole multiples of a scale that `group` neighbours of a row share."""
    most = 2 ** (bits - 1) - 1  # 127 or 7: symmetric around 0
    groups = weight.reshape(weight.shape[0], -1, group)
    scale = np.abs(groups).max(axis=2, keepdims=True) / most
    scale[scale == 0] = 1
    result: Array = groups / scale
    np.rint(result, out=result)
    result *= scale
    return result.reshape(weight.shape)


WAYS: tuple[tuple[str, int, int], ...] = (  # name, bits, numbers that share a scale; 0: a whole row
    ("int8, a scale for each row", 8, 0),
    ("int4, a scale for each row", 4, 0),
    ("int4, a scale for each 64", 4, 64),
    ("int4, a scale for each 32", 4, 32),
)


def _bits_a_weight(bits: int, group: int, columns: int) -> float:
    return bits + 16 / (group or columns)  # scales are of 16 bits


def _relative_error(weight: Array, near: Array) -> float:
    return float(np.sqrt(np.mean((weight - near) ** 2) / np.mean(weight**2)))


def _fewer_bits() -> None:
    checkpoint = _core.Checkpoint(str(bundled_model_folder()))
    weight = checkpoint.numpy("model.layers.15.mlp.gate_proj.weight")  # (1536, 576)
    rows = np.abs(weight).max(axis=1) / np.sqrt(np.mean(weight**2, axis=1))
    lines = [("bfloat16, as it is", "16.00", "269", "-")]
    body = 106.2e6  # numbers in the products of the 30 layers; the embedding and the norms stay as they are
    rest = 269.03 - body * 2 / 1e6
    for name, bits, group in WAYS:
        near = quantised(weight, bits, group or weight.shape[1])
        each = _bits_a_weight(bits, group, weight.shape[1])
        megabytes = rest + body * each / 8 / 1e6
        lines.append(
            (name, f"{each:.2f}", f"{megabytes:.0f}", f"{100 * _relative_error(weight, near):.2f} %")
        )
    section("Fewer bits for a weight")
    table(("format", "bits a weight", "MB a step", "error of the weights"), lines)
    say(
        f"The error is measured on layer 15's gate projection. Its rows have a largest weight of "
        f"{rows.min():.1f} to {rows.max():.1f} times their root mean square."
    )


def _scores(ids: list[int], device: str) -> list[tuple[str, float, float]]:
    """What the model thinks of a text with its weights rounded: the mean log-probability of a token."""
    lines, points = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = bundled_model_folder()
        os.symlink(source / "config.json", folder / "config.json")  # no tokenizer: it gets ids
        for way, bits, group in (("bfloat16, as it is", 16, 0), WAYS[0], WAYS[1], WAYS[3]):
            if bits < 16:
                _write_quantised(source / "model.safetensors", folder / "model.safetensors", bits, group)
            else:
                os.symlink(source / "model.safetensors", folder / "model.safetensors")
            engine = Engine(folder, device=device, max_model_len=256, kv_cache_memory_bytes=16 << 20)
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            judged = engine.generate([ids], params)[0]
            assert judged.prompt_logprobs is not None
            chosen = [
                entry[token].logprob
                for token, entry in zip(judged.prompt_token_ids, judged.prompt_logprobs, strict=True)
                if entry is not None
            ]
            mean = sum(chosen) / len(chosen)
            each = _bits_a_weight(bits, group, 576) if bits < 16 else 16.0
            lines.append((way, f"{each:.2f}", f"{-mean:.1f}"))
            points.append((way, round(each, 2), round(-mean, 1)))
            del engine
    section("What the model loses")
    table(("format", "bits a weight", "nats a token"), lines)
    say(f"On {len(chosen) + 1} tokens of English.")
    return points


def _write_quantised(source: Path, target: Path, bits: int, group: int) -> None:
    """A copy of a model file whose products' weights are rounded. It is as large as before."""
    if target.is_symlink():
        target.unlink()
        shutil.copyfile(source, target)
    before, after = np.memmap(source, np.uint8, "r"), np.memmap(target, np.uint8, "r+")
    size = int(before[:8].view(np.uint64)[0])
    header = json.loads(before[8 : 8 + size].tobytes())
    for name, entry in header.items():
        if not name.endswith("_proj.weight"):
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        weight = before[begin:end].view(ops.bfloat16).astype(np.float32).reshape(entry["shape"])
        near = quantised(weight, bits, group or weight.shape[1])
        after[begin:end] = near.astype(ops.bfloat16).ravel().view(np.uint8)


# ---- speculative decoding


def n_gram_draft(tokens: Sequence[int], count: int, n: int = 2) -> list[int]:
    """What followed the last n tokens when they were there before, most recently: at most `count` tokens."""
    for start in range(len(tokens) - n - 1, -1, -1):
        if list(tokens[start : start + n]) == list(tokens[-n:]):
            return list(tokens[start + n : start + n + count])
    return []


def _guessed_tokens(device: str) -> list[tuple[str, float, float]]:
    # In float32 the same tokens come on every machine.
    engine = Engine(device=device, dtype="float32", max_model_len=512, kv_cache_memory_bytes=64 << 20)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = engine.generate(list(PROMPTS.values()), params)
    lines, points = [], []
    for name, output in zip(PROMPTS, outputs, strict=True):
        right = output.outputs[0].token_ids
        made, steps, offered, accepted = 0, 0, 0, 0
        while made < len(right):
            draft = n_gram_draft([*output.prompt_token_ids, *right[:made]], DRAFT)
            same = 0
            while same < len(draft) and made + same < len(right) and draft[same] == right[made + same]:
                same += 1
            offered, accepted, steps = offered + len(draft), accepted + same, steps + 1
            made += same + 1  # the step also gives the token after those that were right
        share = accepted / offered if offered else 0.0
        lines.append((name, offered, accepted, f"{share:.0%}", steps, f"{NEW_TOKENS / steps:.2f}"))
        points.append((name, round(share, 3), round(NEW_TOKENS / steps, 3)))
    section("Guessed tokens")
    table(("text", "guessed", "right", "share", f"steps for {NEW_TOKENS}", "tokens a step"), lines)

    section("How many tokens a step")
    shares = (0.3, 0.5, 0.7, 0.9)
    table(
        ("tokens guessed", *(f"{share:.0%} right" for share in shares)),
        [(k, *(f"{_expected(share, k):.2f}" for share in shares)) for k in (1, 2, 4, 7)],
    )
    return points


def _expected(share: float, count: int) -> float:
    """Tokens of a step when each guess is right with this probability, and counts if all before it are."""
    return (1 - share ** (count + 1)) / (1 - share)


# ---- the KV cache


def _smaller_cache(ids: list[int]) -> None:
    section("Bytes for a token of the cache")
    lines = []
    for name, layers, kv_heads, heads in (("the small model", 30, 3, 9), ("the 1B shape", 16, 8, 32)):
        numbers = 2 * layers * kv_heads * 64
        lines.append(
            (
                name,
                f"{2 * layers * heads * 64 * 2:,}",
                f"{numbers * 2:,}",
                f"{numbers + 2 * layers * kv_heads * 2:,}",
                f"{numbers // 2 + 2 * layers * kv_heads * 2:,}",
            )
        )
    table(("", "no GQA, bfloat16", "bfloat16", "int8", "int4"), lines)
    say("int8 and int4 have a scale of 2 bytes for each head of each token.")

    keys, values = _layer_keys_and_values(ids, KV_LAYER)
    section("The error of a smaller cache")
    rows = []
    for name, array in (("keys", keys), ("values", values)):
        per_head = array.reshape(-1, 64)  # a row for each token and head
        sizes = np.sqrt(np.mean(per_head**2, axis=0))
        rows.append(
            (
                name,
                f"{100 * _relative_error(per_head, quantised(per_head, 8, 64)):.2f} %",
                f"{100 * _relative_error(per_head, quantised(per_head, 4, 64)):.1f} %",
                f"{sizes.max() / np.median(sizes):.1f}",
            )
        )
    table(("", "int8", "int4", "largest channel / median"), rows)
    say(f"Of {keys.shape[0]} tokens in layer {KV_LAYER} of the small model, before the rotation of RoPE.")


def _layer_keys_and_values(ids: list[int], layer: int) -> tuple[Array, Array]:
    """Keys and values (T, Hk·Dh) of a text: the engine's norms, all else in numpy, layer after layer."""
    checkpoint = _core.Checkpoint(str(bundled_model_folder()))

    def weight(i: int, name: str) -> Array:
        return checkpoint.numpy(f"model.layers.{i}.{name}.weight")

    def turned(x: Array, heads: int) -> Array:
        """RoPE: (T, heads·64) -> (heads, T, 64)."""
        x = x.reshape(len(ids), heads, 64).transpose(1, 0, 2)
        angle = np.arange(len(ids))[:, None] * 100_000.0 ** (-np.arange(32) / 32)
        a, b = x[..., :32], x[..., 32:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = checkpoint.numpy("model.embed_tokens.weight")[ids]
    mask = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for i in range(layer + 1):
        h = ops.rms_norm(x, weight(i, "input_layernorm"))
        k, v = h @ weight(i, "self_attn.k_proj").T, h @ weight(i, "self_attn.v_proj").T
        if i == layer:
            break
        q = turned(h @ weight(i, "self_attn.q_proj").T, 9)
        keys = np.repeat(turned(k, 3), 3, axis=0)
        values = np.repeat(v.reshape(len(ids), 3, 64).transpose(1, 0, 2), 3, axis=0)
        scores = q @ keys.transpose(0, 2, 1) / 8 + mask
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = (weights @ values).transpose(1, 0, 2).reshape(len(ids), 576).astype(np.float32)
        x = x + mixed @ weight(i, "self_attn.o_proj").T
        h = ops.rms_norm(x, weight(i, "post_attention_layernorm"))
        gate, up = h @ weight(i, "mlp.gate_proj").T, h @ weight(i, "mlp.up_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(i, "mlp.down_proj").T
    return k, v


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    share = np.linspace(0, 0.98, 50)
    for count, color in ((1, GREY), (2, GREEN), (DRAFT, BLUE)):
        left.plot(100 * share, [_expected(s, count) for s in share], color=color, label=f"{count} guessed")
    for name, x, y in data["acceptance"]:
        left.plot(100 * x, y, "o", color=ORANGE)
        left.annotate(name, (100 * x, y), textcoords="offset points", xytext=(6, -11), fontsize=9)
    left.set(
        title="Speculation: tokens in a step",
        xlabel="guesses that were right, %",
        ylabel="tokens a step",
        xlim=(0, 105),
        ylim=(0.9, 5),
    )
    left.legend(loc="upper left", fontsize=9)
    names = [f"{name.split(',')[0]}\n{name.split('for each ')[-1]}" for name, _, _ in data["scores"]]
    names[0] = "bfloat16"
    right.bar(names, [y for _, _, y in data["scores"]], color=[GREY, BLUE, ORANGE, GREEN])
    for i, (_, bits, y) in enumerate(data["scores"]):
        right.text(i, y + 0.04, f"{y:.1f}", ha="center", fontsize=9)
        right.text(i, 0.1, f"{bits:.2f} bits", ha="center", color="white", fontsize=8)
    right.set(title="Rounded weights: surprise at a text", ylabel="nats a token (less is better)")
    right.tick_params(axis="x", labelsize=9)
