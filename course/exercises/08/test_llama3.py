"""Exercise 8.2: the speeds of Llama 3, against the engine's."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm import _core

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "low", "high", "original"),
    [(64, 5e5, 32.0, 1.0, 4.0, 8192), (128, 5e5, 8.0, 1.0, 4.0, 8192), (64, 1e4, 4.0, 2.0, 16.0, 2048)],
)
def test_speeds_are_those_of_the_engine(
    exercise: Exercise, head_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> None:
    config = {**CONFIG, "head_dim": head_dim, "rope_theta": theta}
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    plain = _core.Rope(_core.parse_config(json.dumps(config))).inv_freq()
    expected = _core.Rope(_core.parse_config(json.dumps({**config, "rope_scaling": scaling}))).inv_freq()
    found = exercise.python("llama3.py").scaled(plain.astype(np.float64), factor, low, high, original)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
