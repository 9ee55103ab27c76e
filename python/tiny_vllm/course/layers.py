"""Queries, keys and values of the small model's layers, computed with tiny_vllm.ops in float32."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from tiny_vllm import _core, ops
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.tokenizer import Tokenizer

Array = Any
H, HK, DH = 9, 3, 64  # query heads, KV heads and head dim of the small model


class SmallModel:
    def __init__(self, device: str = "cpu") -> None:
        self.folder = bundled_model_folder()
        self.device = device
        self.config = _core.parse_config((self.folder / "config.json").read_text(encoding="utf-8"))
        self.heads: int = self.config["num_heads"]
        self.kv_heads: int = self.config["num_kv_heads"]
        self.head_dim: int = self.config["head_dim"]
        self.eps: float = self.config["rms_norm_eps"]
        self._checkpoint = _core.Checkpoint(str(self.folder))
        self._rope = _core.Rope(self.config)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.folder)

    def pieces(self, ids: list[int]) -> list[str]:
        return [self.tokenizer.decode([i]) for i in ids]

    def weight(self, name: str) -> Array:
        return self._checkpoint.numpy(name)

    def residual(self, ids: list[int], layer: int) -> Array:
        """(T, D): the residual stream that this layer reads, of one prompt."""
        x = ops.embedding(self.weight("model.embed_tokens.weight"), ids, device=self.device)
        for number in range(layer):
            x = self.after_layer(x, number)
        return x

    def qkv(self, ids: list[int], layer: int) -> Array:
        """(T, (H+2Hk)·Dh): queries, keys and values of a layer, not rotated yet."""
        return self.qkv_of(self.residual(ids, layer), layer)

    def split(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Queries (T, H, Dh), keys and values (T, Hk, Dh)."""
        heads = qkv.reshape(qkv.shape[0], -1, self.head_dim)
        end_of_keys = self.heads + self.kv_heads
        return heads[:, : self.heads], heads[:, self.heads : end_of_keys], heads[:, end_of_keys:]

    def cos_sin(self, positions: Any) -> Array:
        """(T, Dh/2, 2)"""
        return np.stack([self._rope.cos_sin(int(p)) for p in positions])

    def rotated(self, qkv: Array, positions: Any = None) -> Array:
        """qkv with its queries and keys turned to their positions: 0, 1, 2, ... unless given."""
        rows = qkv.shape[0]
        q, keys, _ = self._rope_and_cache(qkv, range(rows) if positions is None else positions)
        q = q.copy()
        heads = q.reshape(rows, -1, self.head_dim)
        heads[:, self.heads : self.heads + self.kv_heads] = keys[0].swapaxes(0, 1)
        return q

    def attention(self, rotated: Array, **options: Any) -> Array:
        """(T, H·Dh): causal attention of one prompt, by the engine's own kernel.

        That kernel reads keys and values out of blocks (chapter 17); here one block holds the whole prompt.
        """
        rows = rotated.shape[0]
        _, keys, values = self.split(rotated)
        return ops.paged_attention(
            rotated,
            np.ascontiguousarray(keys.swapaxes(0, 1))[None],  # (1, Hk, T, Dh): a cache of one block
            np.ascontiguousarray(values.swapaxes(0, 1))[None],
            block_tables=[[0]],
            context_len=[rows],
            query_start=[0, rows],
            num_heads=self.heads,
            device=self.device,
            **options,
        )

    def _rope_and_cache(self, qkv: Array, positions: Any) -> tuple[Array, Array, Array]:
        rows = qkv.shape[0]
        room = np.zeros((1, self.kv_heads, rows, self.head_dim), np.float32)
        return ops.rope_and_cache(
            qkv,
            room,
            room,
            slot_mapping=range(rows),
            cos_sin=self.cos_sin(positions),
            num_heads=self.heads,
            device=self.device,
        )

    def qkv_of(self, x: Array, layer: int) -> Array:
        name = f"model.layers.{layer}."
        parts = [self.weight(f"{name}self_attn.{part}_proj.weight") for part in "qkv"]
        norm = self.weight(name + "input_layernorm.weight")
        return ops.norm_matmul(x, norm, np.concatenate(parts), eps=self.eps, device=self.device)

    def after_layer(self, x: Array, layer: int) -> Array:
        name = f"model.layers.{layer}."
        attended = self.attention(self.rotated(self.qkv_of(x, layer)))
        x = ops.matmul_add(x, attended, self.weight(name + "self_attn.o_proj.weight"), device=self.device)
        gate_up = np.concatenate([self.weight(f"{name}mlp.{part}_proj.weight") for part in ("gate", "up")])
        norm = self.weight(name + "post_attention_layernorm.weight")
        gated = ops.norm_matmul(x, norm, gate_up, eps=self.eps, activation="silu", device=self.device)
        return ops.matmul_add(x, gated, self.weight(name + "mlp.down_proj.weight"), device=self.device)


def plain_attention(query: Any, keys: Any, values: Any) -> Any:
    """One token: query (H, Dh), keys and values (context, Hk, Dh) -> (H, Dh), in float64."""
    out = np.empty(query.shape)
    for head in range(len(query)):
        kv_head = head * keys.shape[1] // len(query)
        scores = keys[:, kv_head].astype(np.float64) @ query[head] / np.sqrt(query.shape[1])
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ values[:, kv_head]
    return out
