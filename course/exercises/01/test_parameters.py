"""Exercise 1.2: counting parameters, against files and against the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Exercise
from tiny_vllm import Engine
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.course.lab import REPOSITORY

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CHANGES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "tied is not said": {"tie_word_embeddings": None},
    "as many kv heads": {"num_key_value_heads": None},
    "wide heads": {"head_dim": 10},
    "head_dim is null": {"head_dim": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_engine_counts_the_same(exercise: Exercise, change: str, tmp_path: Path) -> None:
    config = {**BASE, **CHANGES[change]}
    if change in ("tied is not said", "as many kv heads"):
        config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = Engine(tmp_path, device="cpu", load_format="dummy", kv_cache_memory_bytes=1_000_000)
    counted = exercise.python("parameters.py").count_parameters(config)
    assert counted == engine._core.info()["num_parameters"]


def test_models_of_this_course(exercise: Exercise) -> None:
    count_parameters = exercise.python("parameters.py").count_parameters
    small = json.loads((bundled_model_folder() / "config.json").read_text())
    assert count_parameters(small) == 134_515_008
    larger = json.loads((REPOSITORY / "benchmarks/llama-3.2-1b-shape/config.json").read_text())
    assert count_parameters(larger) == 1_235_814_400
