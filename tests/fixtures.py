"""Small models with known behaviour, written to folders. Numpy only: no download, no torch.

`write_chain`   says any text we like, split into tokens where we like.
`write_fixed`   has the same logits at each step, whatever the history.
`write_rand`    is random, with heads * head_dim different from the hidden size.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Tensors = Mapping[str, np.ndarray]

_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def write_safetensors(path: Path, tensors: Tensors, dtype: str = "float32") -> None:
    """All tensors in one file, converted to `dtype`."""
    numpy_type = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    header: dict[str, Any] = {}
    blobs: list[bytes] = []
    position = 0
    for name, array in tensors.items():
        blob = np.ascontiguousarray(array, dtype=numpy_type).tobytes()
        header[name] = {
            "dtype": _CODES[dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + len(blob)],
        }
        blobs.append(blob)
        position += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def llama_config(**changes: Any) -> dict[str, Any]:
    """A config.json of the Llama family. A change to `...` leaves the key out."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **changes,
    }
    return {key: value for key, value in config.items() if value is not ...}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    H = config["num_attention_heads"]
    Hk = config.get("num_key_value_heads") or H
    Dh = config.get("head_dim") or D // H
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (V, D)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "input_layernorm.weight": (D,),
            p + "post_attention_layernorm.weight": (D,),
            p + "self_attn.q_proj.weight": (H * Dh, D),
            p + "self_attn.k_proj.weight": (Hk * Dh, D),
            p + "self_attn.v_proj.weight": (Hk * Dh, D),
            p + "self_attn.o_proj.weight": (D, H * Dh),
            p + "mlp.gate_proj.weight": (F, D),
            p + "mlp.up_proj.weight": (F, D),
            p + "mlp.down_proj.weight": (D, F),
        }
    return shapes


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights, large enough that attention is far from uniform and each position matters."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        x = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            x = 1 + np.float32(0.25) * x
        elif "embed_tokens" not in name:
            gain = 1.6 if "q_proj" in name or "k_proj" in name else 2.0 if "lm_head" in name else 1.0
            x *= np.float32(gain / shape[1] ** 0.5)
        tensors[name] = x
    return tensors


def silent_layers(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All tensors but embedding and lm_head, such that the layers add nothing and the norms have weight 1."""
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if "norm" in name:
            tensors[name] = np.ones(shape, np.float32)
        elif "model.layers" in name:
            tensors[name] = np.zeros(shape, np.float32)
    return tensors


# ---- tokenizers --------------------------------------------------------------------------------------------


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in of each byte value, in byte order."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(spare)) for b in range(256)]


def write_byte_tokenizer(
    folder: Path,
    pieces: Sequence[bytes] = (),
    special: Sequence[str] = (),
    *,
    bos: str | None = None,
    add_bos: bool = False,
    eos: str | None = None,
    chat_template: str | None = None,
    **tokenizer_config: Any,
) -> None:
    """A byte-level tokenizer: ids 0-255 are the bytes, then `pieces`, then `special`.

    Text is encoded byte by byte; pieces are only ever said by a model (`ignore_merges` makes a vocabulary
    without merges legal). With `add_bos` the post-processor puts `bos` in front.
    """
    alphabet = byte_alphabet()
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    for piece in pieces:
        token = "".join(alphabet[b] for b in piece)
        assert token not in vocabulary, piece
        vocabulary[token] = len(vocabulary)
    added = []
    for content in special:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": len(vocabulary), "content": content, "special": True, **flags})
        vocabulary[content] = len(vocabulary)
    post = None
    if add_bos:
        assert bos is not None
        begin, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        post = {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {bos: {"id": bos, "ids": [vocabulary[bos]], "tokens": [bos]}},
        }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    # A regex that matches single characters keeps whole words out of the reach of ignore_merges.
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": post,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": True,
                "vocab": vocabulary,
                "merges": [],
            },
        },
    )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        **tokenizer_config,
    }
    for key, value in (("bos_token", bos), ("eos_token", eos), ("chat_template", chat_template)):
        if value is not None:
            config[key] = value
    write_json(folder / "tokenizer_config.json", config)


# ---- models ------------------------------------------------------------------------------------------------


def write_model(folder: Path, config: Mapping[str, Any], tensors: Tensors, dtype: str = "float32") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_safetensors(folder / "model.safetensors", tensors, dtype)
    return folder


CHAIN_START = 511  # the prompt of a chain: what follows it is the script
CHAIN_END = 510  # the token that ends it


def write_chain(folder: Path, script: Sequence[int], *, eos: Any = CHAIN_END, **config_changes: Any) -> Path:
    """A model that says `script` token by token after CHAIN_START, then CHAIN_END, whatever else the prompt
    holds.

    Each id can be used once. Hidden size = vocabulary = 512: the embedding is the identity, and the row of
    the lm_head that follows token t looks at element t.
    """
    V = 512
    path = [CHAIN_START, *script, CHAIN_END]
    assert len(set(path)) == len(path), "each id can be used once"
    config = llama_config(
        hidden_size=V, vocab_size=V, rms_norm_eps=1e-12, bos_token_id=..., eos_token_id=eos, **config_changes
    )
    head = np.zeros((V, V), np.float32)
    for here, following in itertools.pairwise(path):
        head[following, here] = 10
    head[CHAIN_END, CHAIN_END] = 10  # for runs that ignore the end
    return write_model(
        folder,
        config,
        {
            **silent_layers(config),
            "model.embed_tokens.weight": np.eye(V, dtype=np.float32),
            "lm_head.weight": head,
        },
    )


def write_text_chain(
    folder: Path, pieces: Sequence[bytes], special: Sequence[str] = (), **options: Any
) -> Path:
    """A chain that says `pieces` as one token each, with a tokenizer that knows them (after those of all
    bytes).
    """
    single = [p for p in pieces if len(p) > 1]
    ids = {bytes([b]): b for b in range(256)} | {p: 256 + i for i, p in enumerate(single)}
    write_chain(folder, [ids[p] for p in pieces], **options)
    write_byte_tokenizer(folder, single, special)
    return folder


def write_fixed(folder: Path, logits: Sequence[float], **config_changes: Any) -> Path:
    """A model whose logits are `logits` at each step: all rows of the embedding are the same unit vector."""
    V, D = len(logits), 64
    config = llama_config(hidden_size=D, vocab_size=V, rms_norm_eps=1e-12, **config_changes)
    embedding = np.zeros((V, D), np.float32)
    embedding[:, 0] = 1
    head = np.zeros((V, D), np.float32)
    head[:, 0] = np.asarray(logits, np.float32) / np.float32(D**0.5)
    return write_model(
        folder,
        config,
        {**silent_layers(config), "model.embed_tokens.weight": embedding, "lm_head.weight": head},
    )


RAND = llama_config(
    hidden_size=256,
    intermediate_size=320,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
)


def write_rand(folder: Path, *, seed: int = 0, dtype: str = "float32", **config_changes: Any) -> Path:
    """Two layers, hidden 256, 8 query heads over 2 KV heads of 64, vocabulary 512."""
    config = {key: value for key, value in {**RAND, **config_changes}.items() if value is not ...}
    return write_model(folder, config, random_tensors(config, seed), dtype)


def kv_bytes(folder: Path, num_blocks: int, block_size: int = 16, dtype: str = "float32") -> int:
    """kv_cache_memory_bytes that buys exactly this many blocks."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    element = 4 if dtype == "float32" else 2
    return num_blocks * block_size * 2 * config["num_hidden_layers"] * heads * head_dim * element
