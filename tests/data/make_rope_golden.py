"""Computes rope_golden.json: rotary angles of transformers for every kind of rope.

python tests/data/make_rope_golden.py OUT.json  # needs the extra `hf`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

POSITIONS = [0, 1, 4095, 8191, 131071]

LLAMA_3_2_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

CASES: dict[str, dict[str, Any]] = {
    "llama 3.2 1b": LLAMA_3_2_1B,
    "default": SMALL,
    "default, theta 1e6, head_dim 128": {**SMALL, "rope_theta": 1e6, "head_dim": 128},
    "default, head_dim 6": {**SMALL, "head_dim": 6},
    "linear": {**SMALL, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "dynamic": {**SMALL, "rope_scaling": {"rope_type": "dynamic", "factor": 2.5}},
    "llama3, factor 8": {**LLAMA_3_2_1B, "rope_scaling": {**LLAMA_3_2_1B["rope_scaling"], "factor": 8.0}},
    "yarn": {**SMALL, "rope_scaling": YARN},
    "yarn, qwen2 style": {
        **SMALL,
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "yarn, no original length": {**SMALL, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, not truncated": {**SMALL, "rope_scaling": {**YARN, "truncate": False}},
    "yarn, all parameters": {
        **SMALL,
        "rope_parameters": {
            **YARN,
            "rope_theta": 50000.0,
            "beta_fast": 16,
            "beta_slow": 2,
            "attention_factor": 0.7,
        },
    },
    "yarn, mscale": {**SMALL, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "yarn, a step": {**SMALL, "rope_scaling": {**YARN, "beta_fast": 2, "beta_slow": 2, "truncate": False}},
}


def angles_of(config: dict[str, Any]) -> dict[str, Any]:
    """At each position, in a sequence of position + 1 tokens: frequencies (Dh/2) and cos, sin (Dh/2, 2)."""
    hf = AutoConfig.for_model(**config)
    rows = []
    for position in POSITIONS:
        rope = LlamaRotaryEmbedding(hf)  # a new one each time: dynamic scaling keeps state
        cos, sin = rope(torch.zeros(1, dtype=torch.float32), torch.tensor([[position]]))
        half = cos.shape[-1] // 2
        pairs = torch.stack([cos[0, 0, :half], sin[0, 0, :half]], dim=-1)
        rows.append({"position": position, "inv_freq": rope.inv_freq.tolist(), "cos_sin": pairs.tolist()})
    return {"config": config, "attention_scaling": rope.attention_scaling, "rows": rows}


def shorten(value: Any) -> Any:
    """Nine digits tell every float32 from its neighbours."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, list):
        return [shorten(v) for v in value]
    if isinstance(value, dict):
        return {k: v if k == "config" else shorten(v) for k, v in value.items()}
    return value


def main() -> None:
    oracle = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    cases = {name: shorten(angles_of(config)) for name, config in CASES.items()}
    text = json.dumps({"oracle": oracle, "cases": cases}, separators=(",", ":"))
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
