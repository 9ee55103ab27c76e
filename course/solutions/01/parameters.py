"""Exercise 1.2: how many numbers a model has, from its config.json alone.

The letters, and where they are in the file:

    V  vocab_size             L  num_hidden_layers       H   num_attention_heads
    D  hidden_size            F  intermediate_size       Hk  num_key_value_heads; absent: H
    Dh head_dim; absent or null: D / H

The tensors:

    embed_tokens              (V, D)
    lm_head                   (V, D)         only when tie_word_embeddings is not true
    the last norm             (D)
    and in each layer
      two norms               (D)
      q_proj                  (H·Dh, D)
      k_proj, v_proj          (Hk·Dh, D)
      o_proj                  (D, H·Dh)
      gate_proj, up_proj      (F, D)
      down_proj               (D, F)
      biases of q, k and v    (H·Dh), (Hk·Dh), (Hk·Dh)     when model_type is "qwen2"
      q_norm, k_norm          (Dh)                         when model_type is "qwen3"
"""

from __future__ import annotations

from typing import Any


def count_parameters(config: dict[str, Any]) -> int:
    V, D, F = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    H = config["num_attention_heads"]
    Hk = config.get("num_key_value_heads") or H
    Dh = config.get("head_dim") or D // H
    q, kv = H * Dh, Hk * Dh  # H·Dh need not be D

    layer = 2 * D + (q + 2 * kv) * D + D * q + 3 * F * D
    if config["model_type"] == "qwen2":
        layer += q + 2 * kv
    if config["model_type"] == "qwen3":
        layer += 2 * Dh
    tables = 1 if config.get("tie_word_embeddings") else 2
    return tables * V * D + D + config["num_hidden_layers"] * layer
