"""Prefill, decode and the KV cache

What is computed again without a cache, what one costs, and the two ceilings of every kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tiny_vllm import Engine, SamplingParams, _core, ops
from tiny_vllm.course.chapter_12 import Array, Model
from tiny_vllm.course.lab import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Data,
    measured,
    read_report,
    repository_file,
    say,
    section,
    table,
)
from tiny_vllm.ops import bfloat16

PROMPT = "The capital of France is"
GREEDY_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Remembering(Model):
    """The model of chapter 12, which keeps keys and values of what it has read."""

    def begin(self, capacity: int) -> None:
        c = self.config
        shape = (1, c.num_kv_heads, capacity, c.head_dim)
        self.keys = [np.zeros(shape, bfloat16) for _ in range(c.num_layers)]
        self.values = [np.zeros(shape, bfloat16) for _ in range(c.num_layers)]
        self.length = 0  # rows that are in the cache

    def forward(self, ids: list[int], watch: Callable[[Array], None] = lambda residual: None) -> Array:
        """The next ids (T) of the text -> logits (V) of the token after them."""
        self.at_layer = 0
        logits = super().forward(ids, watch)
        self.length += len(ids)
        return logits

    def attention(self, qkv: Array) -> Array:
        layer, places = self.at_layer, np.arange(self.length, self.length + len(qkv))
        self.at_layer += 1
        angles = np.stack([self.rope.cos_sin(int(position)) for position in self.positions(places)])
        on: Any = {"num_heads": self.config.num_heads, "device": self.device}
        qkv, self.keys[layer], self.values[layer] = ops.rope_and_cache(
            qkv, self.keys[layer], self.values[layer], cos_sin=angles, slot_mapping=places, **on
        )
        return ops.paged_attention(
            qkv,
            self.keys[layer],
            self.values[layer],
            block_tables=[[0]],
            context_len=[self.length + len(qkv)],  # keys that the last row sees
            query_start=[0, len(qkv)],
            **on,
        )

    def positions(self, places: Array) -> Array:
        return places


class OffByOne(Remembering):
    """Takes the position of a new token from the length after it was appended."""

    def positions(self, places: Array) -> Array:
        return places + 1 if len(places) == 1 else places


# ---- the experiment


def run(device: str) -> Data:
    engine = Engine(device=device, enable_prefix_caching=False)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(PROMPT)

    engine.generate([ids], GREEDY_TOKEN)  # the first step is slower than the others
    section("The whole text for each token")
    counts = _count(engine, ids, lengths=(4, 8, 16, 32))

    section("What stays as it was")
    model = Remembering(device)
    _what_stays(model, tokenizer.encode("The capital of France is Paris, and that of Italy is"), len(ids))

    section("One row is enough")
    _one_row_is_enough(model, engine, ids)

    section("Bytes")
    shapes = {"small model": model.config, "1B shape": _config_1b()}
    lines = []
    for name, c in shapes.items():
        weights, token = _weight_bytes(c), _kv_bytes(c)
        many = token * c.num_heads // c.num_kv_heads
        lines.append((name, f"{weights / 1e6:,.0f}", f"{token:,}", f"{many:,}", f"{weights // token:,}"))
    table(
        ("", "weights, MB", "a token, bytes", "if Hk were H", "tokens that weigh as much as the weights"),
        lines,
    )
    assert _kv_bytes(model.config) == engine.info()["kv_bytes_per_token"]
    assert _weight_bytes(model.config) == engine.info()["weight_bytes"]

    section("Steps of this machine")
    bandwidth = ops.measure_read_bandwidth() if device == "cpu" else 0.0
    _steps(engine, model.config, device, bandwidth)

    section("The two ceilings of an H200")
    report = read_report("cuda_kernels")
    memory, compute = report["ceilings"]["read_gb_s"] * 1e9, report["ceilings"]["gemm_tflop_s"] * 1e12
    points = {k["name"]: (k["flops"] / k["bytes"], k["flops"] / k["us"] / 1e6) for k in report["kernels"]}
    ridge = compute / memory
    say(
        f"It reads {memory / 1e9:,.0f} GB/s and multiplies {compute / 1e12:.0f} TFLOP/s: "
        f"{ridge:.0f} operations for each byte."
    )
    kernels: list[tuple[str, ...]] = []
    for name in SHOWN:
        k = next(k for k in report["kernels"] if k["name"] == name)
        by_memory, by_compute = k["bytes"] / memory * 1e6, k["flops"] / compute * 1e6
        kernels.append(
            (name, *(f"{x:.1f}" for x in (k["flops"] / k["bytes"], by_memory, by_compute, k["us"])))
        )
    table(("kernel", "FLOP/byte", "memory allows, µs", "arithmetic allows, µs", "it takes, µs"), kernels)

    section("One position too far")
    _one_too_far(OffByOne(device), engine, "Water boils at")
    return {
        "prompt": len(ids),
        "computed": counts,
        "ceilings": [memory / 1e9, compute / 1e12],
        "points": {
            group: [[round(x, 3), round(y, 3)] for name, (x, y) in points.items() if name.startswith(start)]
            for group, start in GROUPS.items()
        },
    }


SHOWN = (
    "cublas gate_up m=1",
    "cublas gate_up m=64",
    "cublas gate_up m=256",
    "cublas gate_up m=2048",
    "attention_decode 64 x 4096",
    "attention_prefill_hopper 1 x 8192",
)
GROUPS = {
    "products, 1 to 8,192 rows": "cublas gate_up",
    "attention of decodes": "attention_decode",
    "attention of a prefill": "attention_prefill_hopper",
}


def _count(engine: Engine, ids: list[int], lengths: tuple[int, ...]) -> dict[str, list[int]]:
    """Tokens computed for the first n of an answer: with the whole text each time, and as the engine does."""
    before = engine.metrics()["num_computed_tokens"]
    text, again, seconds, start = list(ids), [], [], time.perf_counter()
    for _ in range(max(lengths)):
        text += engine.generate([text], GREEDY_TOKEN)[0].outputs[0].token_ids
        again.append(int(engine.metrics()["num_computed_tokens"] - before))
        seconds.append(time.perf_counter() - start)
    lines, kept = [], []
    for n in lengths:
        before, start = engine.metrics()["num_computed_tokens"], time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        output = engine.generate([ids], params)[0].outputs[0]
        took = time.perf_counter() - start
        kept.append(int(engine.metrics()["num_computed_tokens"] - before))
        same = "yes" if list(output.token_ids) == text[len(ids) :][:n] else "no"
        lines.append((n, again[n - 1], kept[-1], measured(seconds[n - 1], "s"), measured(took, "s"), same))
    table(("tokens", "computed again", "with a cache", "time", "time with it", "the same answer"), lines)
    return {"again": again, "kept": [len(ids) + n - 1 for n in range(1, max(lengths) + 1)]}


def _what_stays(model: Remembering, text: list[int], short: int) -> None:
    def after(ids: list[int]) -> tuple[list[Array], dict[str, Array]]:
        model.begin(len(text))
        stream: list[Array] = []
        model.forward(ids, lambda residual: stream.append(residual.astype(np.float32)))
        caches = {"keys": model.keys, "values": model.values}
        return stream, {name: np.stack(cache)[:, 0].astype(np.float32) for name, cache in caches.items()}

    (stream, caches), (whole_stream, whole_caches) = after(text[:short]), after(text)
    of_stream = max(np.abs(a - b[:short]).max() for a, b in zip(stream, whole_stream, strict=True))
    lines = [("residual stream, all layers", f"{of_stream:g}")]
    for name in caches:  # (L, Hk, rows, Dh)
        lines.append((name, f"{np.abs(caches[name] - whole_caches[name])[:, :, :short].max():g}"))
    table((f"the first {short} rows, alone and in a text of {len(text)}", "largest difference"), lines)


def _one_row_is_enough(model: Remembering, engine: Engine, ids: list[int]) -> None:
    assert engine.tokenizer is not None
    model.begin(len(ids) + 8)
    logits, text, lines = model.forward(ids), list(ids), []
    lines.append((len(ids), engine.tokenizer.decode([int(logits.argmax())]), "-"))
    for _ in range(2):
        text.append(int(logits.argmax()))
        logits = model.forward(text[-1:])
        whole = Model.forward(_fresh(model, len(text)), text)
        piece = repr(engine.tokenizer.decode([int(logits.argmax())]))
        lines.append((1, piece, f"{np.abs(logits - whole).max():g}"))
    lines[0] = (lines[0][0], repr(lines[0][1]), "-")
    table(("rows computed", "next token", "logits differ from those of the whole text by"), lines)


def _fresh(model: Remembering, capacity: int) -> Remembering:
    """The same weights, with nothing remembered."""
    other = Remembering.__new__(Remembering)
    other.__dict__ |= model.__dict__
    other.begin(capacity)
    other.at_layer = 0
    return other


def _one_too_far(wrong: Remembering, engine: Engine, prompt: str) -> None:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(prompt)
    right = engine.generate([ids], SamplingParams(temperature=0, max_tokens=6))[0].outputs[0]
    wrong.begin(len(ids) + 8)
    logits, found = wrong.forward(ids), []
    for _ in range(6):
        found.append(int(logits.argmax()))
        logits = wrong.forward(found[-1:])
    table(
        ("", f"{prompt} ..."),
        [("right", repr(right.text)), ("decodes at position + 1", repr(engine.tokenizer.decode(found)))],
    )


def _steps(engine: Engine, config: Any, device: str, bandwidth: float) -> None:
    if device == "cpu":
        say(f"It reads {measured(bandwidth)} GB/s.")
    lines = []
    for rows in (1, 8, 64, 512):
        prompt = [11 + i % 1000 for i in range(rows)]
        best = float("inf")
        for _ in range(3):
            before = engine.metrics()["forward_seconds"]
            engine.generate([prompt], GREEDY_TOKEN)
            best = min(best, engine.metrics()["forward_seconds"] - before)
        moved, flops = _weight_bytes(config) + rows * _kv_bytes(config), _flops(config, rows)
        lines.append(
            (
                rows,
                measured(best * 1e3, "ms"),
                measured(rows / best),
                measured(moved / best / 1e9),
                measured(flops / best / 1e9),
            )
        )
    table(("rows", "time of the step", "rows/s", "GB/s", "GFLOP/s"), lines)


def _matrices(config: Any) -> int:
    """Numbers in the matrices of the layers."""
    c = config
    attention = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim + c.num_heads * c.head_dim
    return int(c.num_layers * c.hidden_size * (attention + 3 * c.intermediate_size))


def _weight_bytes(config: Any) -> int:
    """In bfloat16, with a tied output head."""
    c = config
    norms = (2 * c.num_layers + 1) * c.hidden_size
    return int(2 * (_matrices(c) + c.vocab_size * c.hidden_size + norms))


def _kv_bytes(config: Any) -> int:
    """Keys and values of a token in all layers."""
    return int(2 * config.num_layers * config.num_kv_heads * config.head_dim * 2)


def _flops(config: Any, rows: int) -> int:
    """Of the products; logits for one row. Attention adds little in short texts."""
    return int(2 * (rows * _matrices(config) + config.vocab_size * config.hidden_size))


def _config_1b() -> Any:
    return _core.parse_config(repository_file("benchmarks/llama-3.2-1b-shape/config.json").read_text("utf-8"))


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    n = np.arange(1, len(data["computed"]["again"]) + 1)
    left.plot(n, data["computed"]["again"], color=RED, label="the whole text each time")
    left.plot(n, data["computed"]["kept"], color=BLUE, label="with a KV cache")
    left.set(title="Rows computed", xlabel=f"tokens of the answer (prompt: {data['prompt']})", ylabel="rows")
    left.legend(fontsize=9)
    memory, compute = data["ceilings"]
    x = np.logspace(-0.3, 4, 50)
    right.plot(x, np.minimum(memory * x / 1e3, compute), color=GREY)
    for (name, points), colour in zip(data["points"].items(), (BLUE, ORANGE, GREEN), strict=True):
        right.plot(*np.array(points).T, "o", color=colour, markersize=5, label=name)
    right.set(
        xscale="log", yscale="log", xlabel="operations for each byte", ylabel="TFLOP/s", ylim=(0.03, 1500)
    )
    right.set_title("Roofline of an H200")
    right.text(0.55, 4, f"{memory:,.0f} GB/s", rotation=42, color=GREY, fontsize=9)
    right.text(2200, compute * 1.15, f"{compute:.0f} TFLOP/s", color=GREY, fontsize=9)
    right.legend(fontsize=9, loc="lower right")
