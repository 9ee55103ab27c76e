"""Real queries, keys and values: what attention reads in the first layer of the small model."""

from __future__ import annotations

from typing import Any

import numpy as np

from tiny_vllm import _core, ops
from tiny_vllm.bundled import bundled_model_folder

H, HK, DH = 9, 3, 64  # query heads, KV heads, head dim of the small model


def tokens_of(text: str) -> list[int]:
    from tiny_vllm.tokenizer import Tokenizer

    return Tokenizer.from_folder(bundled_model_folder()).encode(text)


def qkv_of(ids: list[int], first_position: int = 0) -> tuple[Any, Any]:
    """float32: qkv (T, (H+2Hk)·Dh) before RoPE, and cos_sin (T, Dh/2, 2) of the tokens' positions."""
    folder = bundled_model_folder()
    checkpoint = _core.Checkpoint(str(folder))
    names = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    norm, *weights = (checkpoint.numpy(f"model.layers.0.{name}.weight") for name in names)
    x = checkpoint.numpy("model.embed_tokens.weight")[ids]
    qkv = ops.matmul(ops.rms_norm(x, norm, 1e-5), np.concatenate(weights))
    rope = _core.Rope(_core.parse_config((folder / "config.json").read_text(), "config.json"))
    positions = range(first_position, first_position + len(ids))
    return qkv, np.stack([rope.cos_sin(position) for position in positions])


def plain_attention(query: Any, keys: Any, values: Any) -> Any:
    """One token: query (H, Dh), keys and values (context, Hk, Dh) -> (H, Dh), in float64."""
    out = np.empty(query.shape)
    for head in range(len(query)):
        kv_head = head * keys.shape[1] // len(query)
        scores = keys[:, kv_head].astype(np.float64) @ query[head] / np.sqrt(query.shape[1])
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ values[:, kv_head]
    return out
