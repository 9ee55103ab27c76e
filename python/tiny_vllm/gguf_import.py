"""Turns a GGUF file into a Hugging Face model folder, the one form that the engine loads.

    convert_gguf("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2")

writes config.json, model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json and
generation_config.json. Three things differ between the two forms, and each has its place below: the names of
things (`_tensor_plan`), the order of the query and key rows (`unpermute_rows`), and Llama 3's stretched RoPE,
which GGUF keeps as a tensor of frequency factors and Hugging Face as the four numbers it was made from
(`infer_llama3_scaling`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ModelLoadError
from .gguf_file import GGUFFile
from .gguf_tokenizer import write_tokenizer

# Raised when the written folder changes, so that folders of an older version in the cache are made anew.
CONVERTER_VERSION = 1

# GGUF architecture -> (model_type, architectures[0]) of config.json. Mistral's files say `llama`, too.
FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}

# Metadata below `<architecture>.` that is read, or that says nothing about the numbers. Another key means a
# feature that would be lost without a word, so it is refused.
_KNOWN_KEYS = {
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "vocab_size",
}


def convert_gguf(
    gguf_path: str | Path, out_folder: str | Path, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Writes the model of `gguf_path` to the new folder `out_folder` and returns it.

    Weights of any type that the `gguf` package can dequantise are rounded to bfloat16 (nearest, ties to
    even). Memory stays flat: tensors pass through in pieces. The folder appears whole or not at all: it is
    written under another name and then renamed. `progress(bytes_done, bytes_total)` is called as the weights
    are written.

    Raises ModelLoadError, naming the file and the field or tensor: not a GGUF file, cut short, an
    architecture, type, tokenizer or RoPE scaling that is not known here, tensors missing, left over, or of
    the wrong shape.
    """
    source, target = Path(gguf_path), Path(out_folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelLoadError(f"{target}: exists already; give a new folder to write the converted model to")
    file = GGUFFile(source)
    config = read_config(file)
    plan = list(_tensor_plan(file, config))
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write_tokenizer(file, config, work)
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _write_safetensors(work / "model.safetensors", file, plan, progress)
        work.chmod(0o755)
        os.replace(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


# ---- config.json -------------------------------------------------------------------------------------------


def read_config(file: GGUFFile) -> dict[str, Any]:
    """config.json as Hugging Face has it, from the metadata and from which tensors there are."""
    arch = file.get("general.architecture", str)
    if arch not in FAMILIES:
        raise ModelLoadError(f"{file.path}: architecture {arch!r} is not one of {', '.join(FAMILIES)}")
    for key in file.metadata:
        if key.startswith(arch + ".") and key[len(arch) + 1 :] not in _KNOWN_KEYS:
            raise ModelLoadError(
                f"{file.path}: metadata '{key}' is not known here; its feature would be lost"
            )
    model_type, class_name = FAMILIES[arch]

    def number(key: str, default: int | None = None) -> int:
        """A whole number of 1 or more. Some files give one number per layer; then all must be equal."""
        value = file.get(f"{arch}.{key}", (int, list), default)
        if isinstance(value, list):
            value = value[0] if value and all(v == value[0] for v in value) else None
        if not isinstance(value, int) or not 1 <= value < 1 << 31:
            found = file.metadata.get(f"{arch}.{key}", "absent")
            raise ModelLoadError(
                f"{file.path}: metadata '{arch}.{key}' is {str(found)[:60]}, not one positive number"
            )
        return value

    if file.get(f"{arch}.expert_count", int, 0):
        raise ModelLoadError(
            f"{file.path}: '{arch}.expert_count' says mixture of experts, which is not supported"
        )
    if not file.get(f"{arch}.attention.causal", bool, True):
        raise ModelLoadError(
            f"{file.path}: '{arch}.attention.causal' is false; only causal models generate text"
        )
    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden // heads if hidden % heads == 0 else None)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise ModelLoadError(
                f"{file.path}: '{arch}.{key}' is {number(key)}, the head size {head_dim}; must be equal"
            )
    eps = _shortest(file, f"{arch}.attention.layer_norm_rms_epsilon")
    if eps is None:
        raise ModelLoadError(f"{file.path}: metadata '{arch}.attention.layer_norm_rms_epsilon' is absent")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path}: tensor 'token_embd.weight' is missing")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": eps,
        "rope_theta": _shortest(file, f"{arch}.rope.freq_base") or 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
    }
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    window = file.get(f"{arch}.attention.sliding_window", int, 0)
    if window and model_type == "llama":
        config.update(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=window)
        if config.pop("attention_bias") or config.pop("mlp_bias"):
            raise ModelLoadError(f"{file.path}: a sliding window and biases together are not supported")
    elif window:
        raise ModelLoadError(f"{file.path}: '{arch}.attention.sliding_window' is not supported for {arch}")
    scaling = _read_rope_scaling(file, arch, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        token = file.get(f"tokenizer.ggml.{key}_token_id", int)
        if token is not None and 0 <= token < embedding.shape[0]:
            config[name] = token
    return config


def _shortest(file: GGUFFile, key: str) -> float | None:
    """A float32 as the shortest decimal that stands for it: 1e-05, not 9.999999747378752e-06."""
    value = file.get(key, (float, int))
    if value is None:
        return None
    if not math.isfinite(value) or value <= 0:
        raise ModelLoadError(f"{file.path}: metadata '{key}' is {value}; it must be a positive number")
    return float(str(np.float32(value)))


def _read_rope_scaling(file: GGUFFile, arch: str, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = file.get(f"{arch}.rope.scaling.type", str, "none")
    factor = _shortest(file, f"{arch}.rope.scaling.factor") or _shortest(file, f"{arch}.rope.scale_linear")
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise ModelLoadError(f"{file.path}: has both 'rope_freqs.weight' and RoPE scaling '{kind}'")
        info = file.tensors["rope_freqs.weight"]
        if info.shape != (config["head_dim"] // 2,):
            raise ModelLoadError(
                f"{file.path}: 'rope_freqs.weight' has the shape {info.shape}, not (head_dim / 2,)"
            )
        factors = np.concatenate(list(file.rows("rope_freqs.weight")))[:, 0]
        scaling = infer_llama3_scaling(factors, config["rope_theta"], config["head_dim"])
        if scaling is None and not np.all(factors == 1.0):
            raise ModelLoadError(
                f"{file.path}: 'rope_freqs.weight' is not the frequency scaling of Llama 3 (low_freq_factor "
                "1, high_freq_factor 4); use the model's Hugging Face folder"
            )
        return scaling
    if kind == "none" and factor in (None, 1.0):
        return None
    if kind in ("none", "linear"):  # older files give only the factor, and mean linear
        return {"rope_type": "linear", "factor": factor or 1.0}
    original = file.get(f"{arch}.rope.scaling.original_context_length", int)
    if kind != "yarn" or factor is None or not original:
        raise ModelLoadError(
            f"{file.path}: RoPE scaling '{kind}' with factor {factor} and original context {original} is not "
            "supported; linear, yarn (with both) and Llama 3's are"
        )
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        value = _shortest(file, f"{arch}.rope.scaling.yarn_{name}")
        if value is not None:
            scaling[name] = value
    extra = _shortest(file, f"{arch}.rope.scaling.attn_factor") or _shortest(
        file, f"{arch}.rope.scaling.yarn_attn_factor"
    )
    if extra not in (None, 1.0):
        # GGUF multiplies YaRN's own attention factor; Hugging Face replaces it.
        scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
    return scaling


def llama3_frequency_factors(
    theta: float, head_dim: int, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """By what Llama 3 divides each RoPE frequency: (head_dim / 2,) float32.

    Short wavelengths (under original / high tokens) stay, long ones (over original / low) are stretched by
    `factor`, and those between are mixed. Source: `rope_scaling` of Llama 3.1's config.json and its reference
    code.
    """
    inverse = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = original * inverse / (2.0 * np.pi)  # full turns within the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def infer_llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The `rope_scaling` that gives these frequency factors, or None.

    The factors do not fix all four numbers: original, low and high times the same constant give the same
    factors. Nothing else uses them, so low = 1 and high = 4, as in all releases of Llama 3, lose nothing.
    What is left are the factor (the largest value: the longest wavelength is always stretched in full) and
    the original context, a power of two. They are taken only if they give the file's numbers back to float32
    accuracy.
    """
    factor = float(str(factors.max()))
    if factor <= 1.0:
        return None
    for original in (1 << k for k in range(4, 25)):
        again = llama3_frequency_factors(theta, head_dim, factor, 1.0, 4.0, original)
        if np.allclose(again, factors, rtol=2e-5, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    return None


# ---- model.safetensors -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Planned:
    """One tensor to write: its Hugging Face name and shape, the GGUF tensor and the order of its rows."""

    name: str
    shape: tuple[int, ...]
    source: str
    order: np.ndarray | None = None


def unpermute_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """The row of a GGUF query or key matrix that is row i of the Hugging Face one: (num_heads * head_dim,).

    RoPE turns pairs of numbers. GGUF files of architecture `llama` keep the two of a pair in neighbouring
    rows, Hugging Face keeps them half a head apart. Other architectures have Hugging Face's order in both.
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


def layer_tensors(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of one layer: name after `blk.N.` -> (name after `model.layers.N.`, shape)."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    table: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (q_size, hidden)),
        "attn_k.weight": ("self_attn.k_proj.weight", (kv_size, hidden)),
        "attn_v.weight": ("self_attn.v_proj.weight", (kv_size, hidden)),
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, q_size)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (hidden,)),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (ffn, hidden)),
        "ffn_up.weight": ("mlp.up_proj.weight", (ffn, hidden)),
        "ffn_down.weight": ("mlp.down_proj.weight", (hidden, ffn)),
    }
    if config["model_type"] == "qwen3":
        table["attn_q_norm.weight"] = ("self_attn.q_norm.weight", (head_dim,))
        table["attn_k_norm.weight"] = ("self_attn.k_norm.weight", (head_dim,))
    biased: list[str] = []
    if config["model_type"] == "qwen2":
        biased = ["attn_q", "attn_k", "attn_v"]
    elif config.get("attention_bias"):
        biased = ["attn_q", "attn_k", "attn_v", "attn_output"]
    if config.get("mlp_bias"):
        biased += ["ffn_gate", "ffn_up", "ffn_down"]
    for part in biased:
        name, shape = table[part + ".weight"]
        table[part + ".bias"] = (name.replace(".weight", ".bias"), shape[:1])
    return table


def _tensor_plan(file: GGUFFile, config: dict[str, Any]) -> Iterator[_Planned]:
    """What to write, each tensor checked against the config. Raises ModelLoadError at the first misfit."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    permuted = config["model_type"] in ("llama", "mistral")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if permuted and config["head_dim"] % 2:
        raise ModelLoadError(f"{file.path}: the head size {config['head_dim']} is odd; RoPE turns pairs")
    used = {"rope_freqs.weight"}

    def planned(source: str, name: str, shape: tuple[int, ...], num_heads: int | None = None) -> _Planned:
        found = file.tensors.get(source)
        if found is None:
            raise ModelLoadError(f"{file.path}: tensor '{source}' is missing")
        if found.shape != shape:
            raise ModelLoadError(
                f"{file.path}: tensor '{source}' has the shape {found.shape}, expected {shape}"
            )
        used.add(source)
        return _Planned(
            name, shape, source, None if num_heads is None else unpermute_rows(num_heads, config["head_dim"])
        )

    yield planned("token_embd.weight", "model.embed_tokens.weight", (vocab, hidden))
    yield planned("output_norm.weight", "model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield planned("output.weight", "lm_head.weight", (vocab, hidden))
    table = layer_tensors(config)
    for layer in range(config["num_hidden_layers"]):
        for gguf_name, (name, shape) in table.items():
            num_heads = heads.get(gguf_name.split(".")[0]) if permuted else None
            yield planned(f"blk.{layer}.{gguf_name}", f"model.layers.{layer}.{name}", shape, num_heads)
    left_over = sorted(set(file.tensors) - used)
    if left_over:
        raise ModelLoadError(
            f"{file.path}: tensor '{left_over[0]}' ({len(left_over)} in all) has no place in a "
            f"{config['model_type']} model"
        )


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 as uint16: the upper half of the bits, rounded to nearest, ties to even."""
    bits: np.ndarray = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    return np.asarray((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16, dtype="<u2")


def _write_safetensors(
    path: Path, file: GGUFFile, plan: list[_Planned], progress: Callable[[int, int], None] | None
) -> None:
    """The safetensors layout: header length u64, JSON header padded to 8 bytes, data in name order."""
    plan = sorted(plan, key=lambda tensor: tensor.name)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for tensor in plan:
        size = 2 * math.prod(tensor.shape)
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [total, total + size]}
        total += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in plan:
            for rows in file.rows(tensor.source, tensor.order):
                rounded = round_to_bf16(rows)
                if ((rounded & 0x7F80) == 0x7F80).any():
                    raise ModelLoadError(f"{file.path}: tensor '{tensor.source}' holds infinity or NaN")
                out.write(rounded.tobytes())
                done += rounded.nbytes
                if progress is not None:
                    progress(done, total)
