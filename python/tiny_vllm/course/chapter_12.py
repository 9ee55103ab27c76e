"""The MLP and SiLU, residuals, buffers

The whole forward pass out of the engine's ops, what the MLP adds, and which buffer is needed when.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiny_vllm import Engine, SamplingParams, _core, ops
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.course.lab import BLUE, GREEN, GREY, ORANGE, Data, kernels, measured, say, section, table
from tiny_vllm.ops import bfloat16

Array = Any
PROMPT = "The capital of France is"


# ---- the forward pass


@dataclass(frozen=True)
class Layer:
    attn_norm: Array  # (D)
    qkv: Array  # ((H+2Hk)·Dh, D)
    o: Array  # (D, H·Dh)
    mlp_norm: Array  # (D)
    gate_up: Array  # (2F, D)  rows of gate, then of up
    down: Array  # (D, F)


class Model:
    """The small model's weights in bfloat16, and its forward pass."""

    def __init__(self, device: str = "cpu") -> None:
        folder = bundled_model_folder()
        self.device = device
        self.config = _core.parse_config((folder / "config.json").read_text(encoding="utf-8"))
        self.rope = _core.Rope(self.config)
        checkpoint = _core.Checkpoint(str(folder))

        def read(*names: str) -> Array:
            parts = [checkpoint.numpy(f"{name}.weight", "bfloat16").view(bfloat16) for name in names]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        self.embedding, self.final_norm = read("model.embed_tokens"), read("model.norm")
        self.layers = []
        for i in range(self.config.num_layers):
            at = f"model.layers.{i}."
            self.layers.append(
                Layer(
                    attn_norm=read(at + "input_layernorm"),
                    qkv=read(*(f"{at}self_attn.{name}_proj" for name in "qkv")),
                    o=read(at + "self_attn.o_proj"),
                    mlp_norm=read(at + "post_attention_layernorm"),
                    gate_up=read(at + "mlp.gate_proj", at + "mlp.up_proj"),
                    down=read(at + "mlp.down_proj"),
                )
            )

    def forward(self, ids: list[int], watch: Callable[[Array], None] = lambda residual: None) -> Array:
        """ids (T) -> logits (V) of the token that comes after them."""
        eps = self.config["rms_norm_eps"]
        on: Any = {"device": self.device}
        residual = ops.embedding(self.embedding, ids, **on)  # (T, D)
        for layer in self.layers:
            watch(residual)
            qkv = ops.norm_matmul(residual, layer.attn_norm, layer.qkv, eps=eps, **on)
            attended = self.attention(qkv)  # (T, H·Dh)
            residual = ops.matmul_add(residual, attended, layer.o, **on)
            watch(residual)
            gated = ops.norm_matmul(
                residual, layer.mlp_norm, layer.gate_up, eps=eps, activation="silu", **on
            )  # (T, F)
            residual = ops.matmul_add(residual, gated, layer.down, **on)
        watch(residual)
        last = ops.rms_norm(residual[-1:], self.final_norm, eps, **on)  # (1, D)
        return ops.matmul(last, self.embedding, out_dtype=np.float32, **on)[0]  # tied: the head is the table

    def attention(self, qkv: Array) -> Array:
        """Rotates, and lets each row look at those before it. The last arguments belong to chapter 17."""
        config, tokens = self.config, len(qkv)
        on: Any = {"device": self.device}
        cache = np.zeros((1, config.num_kv_heads, tokens, config.head_dim), bfloat16)
        angles = np.stack([self.rope.cos_sin(position) for position in range(tokens)])
        qkv, keys, values = ops.rope_and_cache(
            qkv,
            cache,
            cache,
            num_heads=config.num_heads,
            cos_sin=angles,
            slot_mapping=np.arange(tokens),
            **on,
        )
        return ops.paged_attention(
            qkv,
            keys,
            values,
            num_heads=config.num_heads,
            block_tables=[[0]],
            context_len=[tokens],
            query_start=[0, tokens],
            **on,
        )


def probabilities(logits: Array) -> Array:
    """Softmax in float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


# ---- the experiment


def run(device: str) -> Data:
    model = Model(device)
    engine = Engine(device=device)
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(PROMPT)

    def piece(token: int) -> str:
        return repr(engine.tokenizer.decode([token])) if engine.tokenizer else ""

    section("One gate")
    stream: list[Array] = []
    logits = model.forward(ids, lambda residual: stream.append(residual.astype(np.float32)))
    _one_gate(model, stream, layer=14)

    section("Three kernels")
    _kernels(device)

    section("In place")
    _in_place(device)

    section("The stream grows")
    rms = [[_rms(row) for row in after] for after in stream[::2]]
    added = [
        [
            _rms(after[-1] - before[-1])
            for before, after in zip(stream[i:-1:2], stream[i + 1 :: 2], strict=True)
        ]
        for i in (0, 1)
    ]
    lines = []
    for layer in (0, 10, 20, 25, 28, 29, 30):
        p = probabilities(_head(model, stream[2 * layer]))
        top = int(p.argmax())
        lines.append((layer, _short(rms[layer][0]), _short(rms[layer][-1]), piece(top), _percent(p[top])))
    table(("after layers", "rms, first row", "rms, last row", "the head would say", "sure by"), lines)
    first = np.sort(np.abs(stream[24][0]))[::-1]
    say(
        f"After layer 12, one of the first row's numbers is {_short(first[0])}; without the largest two the "
        f"root mean square would be {_short(_rms(first[2:]))}."
    )

    section("Our token and the engine's")
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=logits.size if device == "cpu" else 20)
    [output] = engine.generate(PROMPT, params)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    logprobs = logits - np.float64(np.logaddexp.reduce(logits.astype(np.float64)))
    difference = max(abs(logprobs[token] - entry.logprob) for token, entry in answer.logprobs[0].items())
    ours = int(logits.argmax())
    table(
        ("", "token", "probability"),
        [
            ("ops, 40 lines of Python", piece(ours), _percent(np.exp(logprobs[ours]))),
            (
                "the engine",
                piece(answer.token_ids[0]),
                _percent(np.exp(answer.logprobs[0][answer.token_ids[0]].logprob)),
            ),
        ],
    )
    bound = 1e-5 if device == "cpu" else 0.2
    count = len(answer.logprobs[0])
    say(f"Of {count} log probabilities, {count if difference < bound else 0} agree within {bound:g}.")

    section("Gate and up, exchanged")
    rows = []
    for name, exchanged in (("none", []), ("layer 14", [14]), ("all 30", list(range(30)))):
        p = probabilities(_exchanged(model, exchanged).forward(ids))
        top = int(p.argmax())
        rows.append((name, piece(top), _percent(p[top]), _percent(p[ours])))
    table(("exchanged in", "most likely", "sure by", f"{piece(ours)} has"), rows)

    section("Buffers")
    sizes = _buffer_bytes(model, engine)
    table(
        ("buffer", "columns", "KB", "written by", "last read by"),
        [
            (name, columns, f"{size / 1e3:,.0f}", written, read)
            for (name, columns, size), (written, read) in zip(sizes, LIFETIMES.values(), strict=True)
        ],
    )
    total = sum(size for _, _, size in sizes)
    say(
        f"{total / 1e6:.1f} MB for {engine.info()['max_num_batched_tokens']} rows. A set for each layer "
        f"would be {total * len(model.layers) / 1e6:.0f} MB."
    )
    return {
        "rms_first": [round(r[0], 3) for r in rms],
        "rms_last": [round(r[-1], 3) for r in rms],
        "added_by_attention": [round(r, 3) for r in added[0]],
        "added_by_mlp": [round(r, 3) for r in added[1]],
        "bytes": {name: size for name, _, size in sizes},
    }


def _one_gate(model: Model, stream: list[Array], layer: int) -> None:
    weights, width = model.layers[layer], model.config.intermediate_size
    read = stream[2 * layer + 1].astype(bfloat16)
    gate_up = ops.norm_matmul(read, weights.mlp_norm, weights.gate_up, eps=model.config["rms_norm_eps"])
    gate, up = np.split(gate_up.astype(np.float32)[-1], [width])
    opened = gate / (1 + np.exp(-gate))
    table(
        ("", "smallest", "largest", "share in (-0.1, 0.1)"),
        [
            (name, f"{x.min():.1f}", f"{x.max():.1f}", f"{np.mean(np.abs(x) < 0.1):.0%}")
            for name, x in (
                ("gate", gate),
                ("up", up),
                ("silu(gate)", opened),
                ("silu(gate) · up", opened * up),
            )
        ],
    )
    squares = np.sort((opened * up).astype(np.float64) ** 2)[::-1]
    share = squares[: width // 10].sum() / squares.sum()
    say(
        f"Layer {layer}, last row, F = {width}. "
        f"A tenth of the products has {share:.0%} of the sum of squares."
    )


def _kernels(device: str) -> None:
    rows, width = (8192 if device == "cuda" else 8), 1536
    gate_up = np.random.default_rng(12).standard_normal((rows, 2 * width)).astype(np.float32)
    expected = _act_mul(gate_up)
    library = kernels("act_mul.cu", device)
    lines = []
    for version, name, moved in ((1, "two kernels", 5), (2, "fused", 3), (3, "vectorised", 3)):
        out = np.full_like(expected, np.nan)
        ms = ctypes.c_float()
        library("act_mul", version, gate_up, out, rows, width, ctypes.byref(ms))
        right = "yes" if np.abs(out - expected).max() < 1e-5 else "no"
        line: tuple[Any, ...] = (version, name, moved * width, right)
        if device == "cuda":
            line += (measured(ms.value * 1e3, "µs"), measured(moved * out.nbytes / ms.value / 1e6, "GB/s"))
        lines.append(line)
    header: tuple[str, ...] = ("", "kernel", "numbers moved for a row", "right")
    table(header + (("time", "memory") if device == "cuda" else ()), lines)


def _in_place(device: str) -> None:
    width, blocks = 1536, 4
    lines = []
    for rows in (1, 2, 8):
        gate_up = np.random.default_rng(rows).standard_normal((rows, 2 * width)).astype(np.float32)
        expected = _act_mul(gate_up)
        out = np.full_like(expected, np.nan)
        kernels("act_mul.cu", device)("act_mul_in_place", gate_up, out, rows, width, blocks)
        wrong = np.abs(out - expected).max(axis=1) > 1e-4
        lines.append((rows, int(wrong.sum()), f"{np.mean(np.abs(out - expected) > 1e-4):.0%}"))
    table(("rows", "rows with an error", "numbers that are wrong"), lines)


def _act_mul(gate_up: Array) -> Array:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up).astype(np.float32)


def _head(model: Model, residual: Array) -> Array:
    last = ops.rms_norm(residual[-1:].astype(bfloat16), model.final_norm, model.config["rms_norm_eps"])
    return ops.matmul(last, model.embedding, out_dtype=np.float32)[0]


def _exchanged(model: Model, layers: list[int]) -> Model:
    """The model with gate and up exchanged in these layers."""
    width = model.config.intermediate_size
    other = Model.__new__(Model)
    other.__dict__ |= model.__dict__
    other.layers = [
        dataclasses.replace(layer, gate_up=np.roll(layer.gate_up, width, axis=0)) if i in layers else layer
        for i, layer in enumerate(model.layers)
    ]
    return other


# By which op of a layer each buffer is first written and last read.
LIFETIMES = {
    "residual": ("the layer before", "the layer after"),
    "hidden": ("norm", "qkv, gate_up"),
    "qkv": ("qkv", "attention"),
    "attention": ("attention", "o"),
    "gate_up": ("gate_up", "act_mul"),
    "mlp": ("act_mul", "down"),
}
_ALIVE = {  # begin and end, in ops
    "residual": [(0, 6)],
    "hidden": [(0, 1), (4, 5)],
    "qkv": [(0, 3)],
    "attention": [(2, 4)],
    "gate_up": [(4, 5)],
    "mlp": [(4, 6)],
}


def _buffer_bytes(model: Model, engine: Engine) -> list[tuple[str, int, int]]:
    c, rows = model.config, int(engine.info()["max_num_batched_tokens"])
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    columns = {
        "residual": c.hidden_size,
        "hidden": c.hidden_size,
        "qkv": heads,
        "attention": c.num_heads * c.head_dim,
        "gate_up": 2 * c.intermediate_size,
        "mlp": c.intermediate_size,
    }
    return [(name, n, rows * n * 2) for name, n in columns.items()]


def _percent(p: float) -> str:
    return measured(100 * p, "%")


def _short(x: float) -> str:
    """Two digits: 22,000, 940, 6.2."""
    rounded = float(f"{x:.2g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x.astype(np.float64) ** 2)))


def draw(data: Data, figure: Any) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    layers = np.arange(len(data["rms_last"]))
    left.plot(layers, data["rms_first"], color=GREY, label="first row")
    left.plot(layers, data["rms_last"], color=BLUE, label="last row")
    left.plot(layers[1:], data["added_by_mlp"], color=ORANGE, linewidth=1, label="its MLP adds")
    left.plot(layers[1:], data["added_by_attention"], color=GREEN, linewidth=1, label="its attention adds")
    left.set(title="The residual stream", xlabel="after layer", ylabel="root mean square (log)", yscale="log")
    left.legend(fontsize=9)
    names = list(_ALIVE)
    most = max(data["bytes"].values())
    for i, name in enumerate(names):
        height = 0.15 + 0.7 * data["bytes"][name] / most
        for begin, end in _ALIVE[name]:
            right.broken_barh([(begin, end - begin)], (-i - height / 2, height), color=BLUE)
    right.set(title="Buffers of a layer (height: bytes)", xlabel="op of the layer", xlim=(0, 6))
    right.set_yticks([-i for i in range(len(names))], names)
    right.set_xticks([i + 0.5 for i in range(6)], ["qkv", "rope", "attn", "o", "gate", "down"])
    for x in range(1, 6):
        right.axvline(x, color=GREY, linewidth=0.4)
