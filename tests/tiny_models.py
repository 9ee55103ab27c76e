"""Tiny random models, one for each edge case of the Llama-like architectures, as Hugging Face folders.

The weights come from numpy's frozen ``RandomState.randint`` and IEEE arithmetic alone, so every machine
writes the same bytes; ``data/tiny_golden.json`` holds their sha256 and what transformers computes from them
(see data/README.md). They are scaled so that attention is far from uniform and that leaving a feature out
moves the logits a lot.

    python tests/tiny_models.py OUT_DIR [NAME...]
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Config = dict[str, Any]
Floats = npt.NDArray[np.float32]

GOLDEN_PATH = Path(__file__).resolve().parent / "data" / "tiny_golden.json"

BOS, EOS, PAD, UNK = 256, 257, 258, 259  # after the 256 ids that are byte values
ABSENT = object()  # in a change of the base configuration: the key is not there

BASE: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
QWEN2: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 16,
    "max_window_layers": 2,
}
QWEN3: Config = {
    **QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "sliding_window": None,
}
MISTRAL: Config = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 16}
LLAMA3_SCALING: Config = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
YARN_SCALING: Config = {"factor": 4.0, "original_max_position_embeddings": 64}
TWO_HEADS_OF_32: Config = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


@dataclass(frozen=True)
class TinyModel:
    """One edge case: how its config differs from BASE, and how to show that the feature matters."""

    what: str
    changes: Config = field(default_factory=dict)
    prompt_lengths: tuple[int, ...] = (7, 33)
    without: Config | None = None  # changes of the configuration that switch the feature off
    without_tensors: dict[str, float] | None = None  # the same by weights: part of a name -> value
    shards: int = 1
    head_in_file: bool = False  # an equal copy of the embedding is in the file as lm_head.weight
    weights_of: str | None = None  # another spelling of the same model


MODELS: dict[str, TinyModel] = {
    "llama_untied": TinyModel("untied lm_head, grouped-query attention 4/2"),
    "llama_tied": TinyModel("tied lm_head, absent from the file", {"tie_word_embeddings": True}),
    "llama_tied_head_in_file": TinyModel(
        "tied lm_head, an equal copy is in the file",
        {"tie_word_embeddings": True},
        head_in_file=True,
        weights_of="llama_tied",
    ),
    "llama_bias": TinyModel(
        "biases on q, k, v, o, gate, up, down",
        {"attention_bias": True, "mlp_bias": True},
        without_tensors={"bias": 0.0},
    ),
    "llama3_rope": TinyModel(
        "llama3 rope scaling, positions past original_max_position_embeddings",
        {
            **TWO_HEADS_OF_32,
            "rope_theta": 500000.0,
            "max_position_embeddings": 2048,
            "rope_scaling": LLAMA3_SCALING,
        },
        (7, 200),
        without={"rope_scaling": None},
    ),
    "llama3_rope_new_style": TinyModel(
        "the same, config.json as transformers 5 writes it (rope_parameters, dtype)",
        {
            **TWO_HEADS_OF_32,
            "max_position_embeddings": 2048,
            "rope_theta": ABSENT,
            "rope_scaling": ABSENT,
            "torch_dtype": ABSENT,
            "dtype": "bfloat16",
            "rope_parameters": {"rope_theta": 500000.0, **LLAMA3_SCALING},
        },
        (7, 200),
        without={"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        weights_of="llama3_rope",
    ),
    "llama_head_dim_32": TinyModel("head_dim 32, not hidden/heads = 16", {"head_dim": 32}),
    "llama_head_dim_24": TinyModel("head_dim 24: not a multiple of 16", {"head_dim": 24}),
    "llama_head_dim_80": TinyModel(
        "head_dim 80", {"head_dim": 80, "num_attention_heads": 2, "num_key_value_heads": 1}
    ),
    "llama_mha": TinyModel("multi-head attention, kv heads = heads", {"num_key_value_heads": 4}),
    "llama_mha_implicit": TinyModel(
        "num_key_value_heads absent: means = heads", {"num_key_value_heads": ABSENT}, weights_of="llama_mha"
    ),
    "llama_mqa": TinyModel("multi-query attention, one kv head", {"num_key_value_heads": 1}),
    "llama_gqa_9_3": TinyModel(
        "9 heads over 3 kv heads, ffn 100, hidden 72: no powers of two",
        {
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "intermediate_size": 100,
        },
    ),
    "qwen2": TinyModel(
        "Qwen2: q, k, v biases although the config names none; sliding_window set but unused",
        QWEN2,
        (7, 50),
        without_tensors={"bias": 0.0},
    ),
    "qwen2_mixed_window": TinyModel(
        "Qwen2 with window 16 on layers >= max_window_layers = 1 only",
        {**QWEN2, "use_sliding_window": True, "max_window_layers": 1},
        (7, 50),
        without={"use_sliding_window": False},
    ),
    "qwen3": TinyModel(
        "Qwen3: RMS norm on each q and k head, head_dim 128",
        QWEN3,
        without_tensors={"q_norm": 1.0, "k_norm": 1.0},
    ),
    "qwen3_tied": TinyModel(
        "Qwen3, tied",
        {**QWEN3, "tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "mistral_window": TinyModel(
        "Mistral, sliding_window 16 on every layer",
        {**MISTRAL, "sliding_window": 16},
        (7, 16, 17, 50),
        without={"sliding_window": None},
    ),
    "mistral_no_window": TinyModel(
        "Mistral, sliding_window null", {**MISTRAL, "sliding_window": None}, (7, 50)
    ),
    "llama_sharded": TinyModel(
        "three safetensors files and model.safetensors.index.json", shards=3, weights_of="llama_untied"
    ),
    "llama_vocab_1003": TinyModel("vocab 1003, not a multiple of 8 or 64", {"vocab_size": 1003}),
    "llama_float16": TinyModel("float16 weights", {"torch_dtype": "float16"}),
    "llama_float32": TinyModel("float32 weights (not bf16-representable)", {"torch_dtype": "float32"}),
    "llama_rope_linear": TinyModel(
        "linear rope scaling, legacy key `type`",
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        (7, 80),
        without={"rope_scaling": None},
    ),
    "llama_rope_dynamic": TinyModel(
        "dynamic NTK rope scaling past max_position_embeddings 64; greedy as transformers caches: "
        "keys stay rotated with the base in force when they were computed",
        {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        (7, 150),
        without={"rope_scaling": None},
    ),
    "llama_rope_yarn": TinyModel(
        "yarn rope scaling",
        {"max_position_embeddings": 256, "rope_scaling": {"rope_type": "yarn", **YARN_SCALING}},
        (7, 150),
        without={"rope_scaling": None},
    ),
    "qwen2_rope_yarn": TinyModel(
        "yarn as Qwen2.5's cards say to add it: legacy key `type`, max_position_embeddings not raised",
        {**QWEN2, "max_position_embeddings": 64, "rope_scaling": {"type": "yarn", **YARN_SCALING}},
        (7, 150),
        without={"rope_scaling": None},
    ),
    "llama_eps_act": TinyModel(
        "a large rms_norm_eps and tanh-GELU instead of SiLU",
        {"rms_norm_eps": 0.5, "hidden_act": "gelu_pytorch_tanh"},
        without={"rms_norm_eps": 1e-5, "hidden_act": "silu"},
    ),
    "llama_one_layer": TinyModel(
        "one layer, one head",
        {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "intermediate_size": 48,
        },
    ),
}


def load_golden() -> dict[str, Any]:
    """What transformers computes: {"models": {name: {"prompts": [...], ...}}}. See data/README.md."""
    golden: dict[str, Any] = json.loads(GOLDEN_PATH.read_text(encoding="utf-8"))
    return golden


def config_of(name: str) -> Config:
    """The contents of the model's config.json."""
    return {k: v for k, v in {**BASE, **MODELS[name].changes}.items() if v is not ABSENT}


def tensor_shapes(config: Config, head_in_file: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of the checkpoint, in the order in which they are written."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads, head_dim = config.get("num_key_value_heads", heads), config.get("head_dim", hidden // heads)
    family = config["model_type"]

    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if head_in_file or not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        projections = {
            "q": (heads * head_dim, hidden),
            "k": (kv_heads * head_dim, hidden),
            "v": (kv_heads * head_dim, hidden),
            "o": (hidden, heads * head_dim),
        }
        for part, shape in projections.items():
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = shape
            if config["attention_bias"] or (family == "qwen2" and part != "o"):
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = shape[:1]
        if family == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        for part, shape in {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}.items():
            shapes[f"{prefix}mlp.{part}_proj.weight"] = shape
            if config["mlp_bias"]:
                shapes[f"{prefix}mlp.{part}_proj.bias"] = shape[:1]
    return shapes


def random_tensor(seed: str, name: str, shape: tuple[int, ...], tied: bool) -> Floats:
    """Uniform numbers; their place and width depend on what the tensor is for."""
    random = np.random.RandomState(zlib.crc32(f"{seed}/{name}".encode()))
    integers = random.randint(0, 65536, size=shape, dtype=np.int64)
    unit = (integers.astype(np.float64) - 32767.5) / 32768.0 * 3.0**0.5  # mean 0, variance 1
    if "norm" in name:
        values = 1.0 + 0.25 * unit
    elif name.endswith("bias"):
        values = 0.5 * unit
    elif "embed_tokens" in name:
        values = (0.25 if tied else 1.0) * unit
    else:
        gain = 2.0 if "lm_head" in name else 1.6 if "q_proj" in name or "k_proj" in name else 1.0
        values = gain / shape[1] ** 0.5 * unit
    return np.asarray(values, dtype=np.float32)


def tensors_of(name: str) -> dict[str, Floats]:
    """The model's weights in float32, before they are rounded to the file's dtype."""
    model, config = MODELS[name], config_of(name)
    tied, seed = config["tie_word_embeddings"], model.weights_of or name
    shapes = tensor_shapes(config, model.head_in_file)
    tensors = {n: random_tensor(seed, n, shape, tied) for n, shape in shapes.items()}
    if model.head_in_file:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def encode(values: npt.NDArray[Any], dtype: str) -> bytes:
    """float32 numbers as the bytes of bfloat16 (nearest, ties to even), float16 or float32."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, dtype=dtype).tobytes()
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)
    return (rounded >> 16).astype(np.uint16).tobytes()


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]], dtype: str) -> int:
    """Writes one file; returns the bytes of its tensors."""
    code = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, values in tensors.items():
        begin = len(data)
        data += encode(values, dtype)
        header[name] = {"dtype": code, "shape": list(values.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return len(data)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte value, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(rest)) for b in range(256)]


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE without merges: an id is a byte value; after them come the special tokens."""
    special = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD, "<unk>": UNK}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model: Config = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {**{c: b for b, c in enumerate(byte_alphabet())}, **special},
        "merges": [],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t, **flags} for t, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    write_json(folder / "tokenizer.json", tokenizer)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)


def write_model(name: str, folder: Path | str) -> str:
    """Writes the model's files into `folder` (made if absent). Returns the sha256 of its weights: over the
    tensors sorted by name, each name followed by its bytes in the file's dtype. KeyError: no such model."""
    model, config, folder = MODELS[name], config_of(name), Path(folder)
    dtype: str = config["torch_dtype" if "torch_dtype" in config else "dtype"]
    tensors = tensors_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    )
    write_tokenizer(folder)
    if model.shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
    else:
        names, total_size = list(tensors), 0
        weight_map: dict[str, str] = {}
        for shard in range(model.shards):
            file = f"model-{shard + 1:05d}-of-{model.shards:05d}.safetensors"
            part = names[shard :: model.shards]  # a layer's tensors are spread over the files on purpose
            total_size += write_safetensors(folder / file, {n: tensors[n] for n in part}, dtype)
            weight_map.update(dict.fromkeys(part, file))
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)
    digest = hashlib.sha256()
    for tensor_name in sorted(tensors):
        digest.update(tensor_name.encode() + encode(tensors[tensor_name], dtype))
    return digest.hexdigest()


if __name__ == "__main__":
    for model_name in sys.argv[2:] or MODELS:
        print(f"{model_name:26} {write_model(model_name, Path(sys.argv[1]) / model_name)}")
