"""The other way: a Hugging Face folder to a GGUF file with bfloat16 weights, to run it in llama.cpp."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType

from .bpe import CONTROL, NORMAL, SPLIT_STYLES, UNUSED, USER_DEFINED
from .errors import ModelLoadError
from .gguf_import import layer_tensors, llama3_frequency_factors, round_to_bf16, unpermute_rows
from .plain_files import read_json
from .tokenizer import Tokenizer

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def write_gguf_bf16(
    hf_folder: str | Path, out_path: str | Path, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Writes the model in `hf_folder` to the GGUF file `out_path` and returns it.

    Matrices become bfloat16; vectors (norms, biases) float32, as llama.cpp wants them. A folder without a
    tokenizer gives a file without a vocabulary. `progress(bytes_done, bytes_total)` is called as the weights
    are written.

    Raises ModelLoadError for what a GGUF file cannot say: another model family, sliding windows, dynamic RoPE
    scaling, a tokenizer that is not byte-level BPE with a known way to cut words.
    """
    folder, target = Path(hf_folder), Path(out_path)
    config = _read_config(folder)
    tensors = _open_safetensors(folder)
    writer = GGUFWriter(None, _ARCHITECTURES[config["model_type"]])
    _add_config(writer, config, folder / "config.json")
    if (folder / "tokenizer.json").is_file() or (folder / "tokenizer.model").is_file():
        _add_tokenizer(writer, folder, config["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")

    plan = _plan(folder, config, tensors)
    factors = _llama3_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for name, tensor, _ in plan:
        size = math.prod(tensor.shape)
        is_vector = len(tensor.shape) == 1
        kind = GGMLQuantizationType.F32 if is_vector else GGMLQuantizationType.BF16
        writer.add_tensor_info(
            name, tensor.shape, np.dtype(np.float32), size * (4 if is_vector else 2), raw_dtype=kind
        )
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        total, done = sum(math.prod(tensor.shape) for _, tensor, _ in plan), 0
        for _, tensor, order in plan:
            values = tensor.values() if order is None else tensor.values()[order]
            writer.write_tensor_data(values if values.ndim == 1 else round_to_bf16(values))
            done += values.size
            if progress is not None:
                progress(2 * done, 2 * total)
        writer.close()
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


# ---- what is in the folder ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def values(self) -> np.ndarray:
        """As float32, in its shape."""
        if self.dtype == "BF16":
            wide = np.frombuffer(self.data, "<u2").astype("<u4") << 16
            return wide.view("<f4").reshape(self.shape)
        numpy_type = {"F32": "<f4", "F16": "<f2"}[self.dtype]
        return np.frombuffer(self.data, numpy_type).astype("<f4").reshape(self.shape)


def _open_safetensors(folder: Path) -> dict[str, _Tensor]:
    """All tensors of a folder by name. The files are mapped, not read."""
    index = folder / "model.safetensors.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    found: dict[str, _Tensor] = {}
    for name in names:
        path = folder / name
        try:
            with open(path, "rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            start = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(bytes(data[8:start]))
            header.pop("__metadata__", None)
            for tensor, row in header.items():
                begin, end = row["data_offsets"]
                item = {"BF16": 2, "F16": 2, "F32": 4}.get(row["dtype"])
                if item is None or end - begin != item * math.prod(row["shape"]) or start + end > len(data):
                    raise ModelLoadError(
                        f"{path}: tensor '{tensor}' ({row['dtype']}, {row['shape']}) cannot be read"
                    )
                found[tensor] = _Tensor(row["dtype"], tuple(row["shape"]), data[start + begin : start + end])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ModelLoadError):
                raise
            raise ModelLoadError(f"{path}: cannot be read as safetensors: {error!r}") from None
    return found


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json with the keys that `layer_tensors` and this module use filled in."""
    path = folder / "config.json"
    config = read_json(path)
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ModelLoadError(f"{path}: model_type {kind!r} is not one of {', '.join(_ARCHITECTURES)}")
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    for key in (*needed, "max_position_embeddings", "rms_norm_eps"):
        if not isinstance(config.get(key), (int, float)):
            raise ModelLoadError(f"{path}: '{key}' is {config.get(key)!r:.60}, not a number")
    config["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    config["rope_theta"] = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    config["rope_scaling"] = rope or config.get("rope_scaling") or {}
    uses_window = (
        config.get("use_sliding_window") if kind.startswith("qwen") else config.get("sliding_window")
    )
    if uses_window:
        raise ModelLoadError(f"{path}: a sliding window would be ignored by readers of a {kind} GGUF file")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"{path}: 'hidden_act' {config['hidden_act']!r} has no place in a GGUF file")
    if kind == "qwen3" and config.get("attention_bias"):
        raise ModelLoadError(f"{path}: 'attention_bias' of qwen3 has no place in a GGUF file")
    return config


def _plan(
    folder: Path, config: dict[str, Any], tensors: dict[str, _Tensor]
) -> list[tuple[str, _Tensor, np.ndarray | None]]:
    """(GGUF name, tensor, order of its rows) of each tensor to write."""

    def tensor(name: str, shape: tuple[int, ...]) -> _Tensor:
        if name not in tensors:
            raise ModelLoadError(f"{folder}: tensor '{name}' is missing")
        if tensors[name].shape != shape:
            raise ModelLoadError(f"{folder}: '{name}' has the shape {tensors[name].shape}, expected {shape}")
        return tensors[name]

    hidden, vocab = config["hidden_size"], config["vocab_size"]
    plan: list[tuple[str, _Tensor, np.ndarray | None]] = [
        ("token_embd.weight", tensor("model.embed_tokens.weight", (vocab, hidden)), None),
        ("output_norm.weight", tensor("model.norm.weight", (hidden,)), None),
    ]
    if not config.get("tie_word_embeddings", False):
        plan.append(("output.weight", tensor("lm_head.weight", (vocab, hidden)), None))
    orders: dict[str, np.ndarray] = {}
    if _ARCHITECTURES[config["model_type"]] == "llama":
        for part, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
            # The order of the import turned round: argsort of a permutation is its inverse.
            orders[part] = np.argsort(unpermute_rows(config[heads], config["head_dim"]))
    for layer in range(config["num_hidden_layers"]):
        for name, (hf_name, shape) in layer_tensors(config).items():
            found = tensor(f"model.layers.{layer}.{hf_name}", shape)
            plan.append((f"blk.{layer}.{name}", found, orders.get(name.split(".")[0])))
    return plan


# ---- what is said about it ---------------------------------------------------------------------------------


def _add_config(writer: GGUFWriter, config: dict[str, Any], path: Path) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    scaling = config["rope_scaling"]
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif kind == "yarn":
        extra = [k for k in ("mscale", "mscale_all_dim", "truncate") if scaling.get(k) is not None]
        if extra:
            raise ModelLoadError(f"{path}: YaRN's '{extra[0]}' has no place in a GGUF file")
        factor = scaling["factor"]
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(
            scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
        )
        if scaling.get("attention_factor") is not None:
            writer.add_rope_scaling_attn_factors(scaling["attention_factor"] / (0.1 * math.log(factor) + 1.0))
        prefix = f"{_ARCHITECTURES[config['model_type']]}.rope.scaling.yarn"
        writer.add_float32(f"{prefix}_beta_fast", scaling.get("beta_fast") or 32.0)
        writer.add_float32(f"{prefix}_beta_slow", scaling.get("beta_slow") or 1.0)
    elif kind not in ("default", "llama3"):
        raise ModelLoadError(f"{path}: RoPE scaling '{kind}' has no place in a GGUF file")


def _llama3_factors(config: dict[str, Any]) -> np.ndarray | None:
    scaling = config["rope_scaling"]
    if scaling.get("rope_type", scaling.get("type")) != "llama3":
        return None
    return llama3_frequency_factors(
        config["rope_theta"],
        config["head_dim"],
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )


def _add_tokenizer(writer: GGUFWriter, folder: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    path, content = tokenizer.source, json.loads(tokenizer.backend.to_str())
    model = content["model"]
    pre = _pre_name(content)
    if model.get("type") != "BPE" or pre is None or not tokenizer.is_byte_level:
        raise ModelLoadError(
            f"{path}: only byte-level BPE tokenizers that cut words as one of {', '.join(SPLIT_STYLES)} can "
            "be written"
        )
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    for text, i in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if i >= vocab_size:
            raise ModelLoadError(
                f"{path}: token {text!r} has the id {i}, but the model has {vocab_size} rows"
            )
        tokens[i] = text
        types[i] = NORMAL if i not in added else CONTROL if added[i]["special"] else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if not merges:
        raise ModelLoadError(
            f"{path}: has no merges, and llama.cpp reads no vocabulary without; for the weights alone, take "
            "a copy of the folder without the tokenizer"
        )
    writer.add_token_merges(merges)
    around = tokenizer.encode("")
    for name, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        token_id = getattr(tokenizer, f"{name}_token_id")
        if token_id is not None:
            add(token_id)
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and tokenizer.bos_token_id in around[:1])
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and tokenizer.eos_token_id in around[1:])
    if "default" in tokenizer.chat_templates:
        writer.add_chat_template(tokenizer.chat_templates["default"])


def _pre_name(content: dict[str, Any]) -> str | None:
    """The name of the way in which a tokenizer.json cuts words, if it is one of ours."""

    def essence(state: Any) -> Any:
        """Without what has no say in the ids."""
        if isinstance(state, dict):
            return {k: essence(v) for k, v in state.items() if k != "trim_offsets"}
        return [essence(v) for v in state] if isinstance(state, list) else state

    uses_nfc = "NFC" in json.dumps(content.get("normalizer"))
    for name, style in SPLIT_STYLES.items():
        ours = json.loads(style.pre_tokenizer().__getstate__())
        same = essence(ours) == essence(content.get("pre_tokenizer"))
        if (
            same
            and style.nfc == uses_nfc
            and style.ignore_merges == bool(content["model"].get("ignore_merges"))
        ):
            return name
    return None
