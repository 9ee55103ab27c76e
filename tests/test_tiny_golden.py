"""The engine against transformers' numbers for the 29 tiny models of tiny_models.py, one architectural edge
case each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from helpers import check_all_blocks_are_back, greedy, open_engine, tokens_of
from tiny_vllm.outputs import Logprob

GOLDEN: dict[str, Any] = tiny_models.load_golden()["models"]
NEW_TOKENS = 16

# One of the models has a tensor that is not used, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*lm_head.weight is in the file")


def log_softmax(logits: list[float]) -> np.ndarray:
    x = np.asarray(logits, np.float64)
    x -= x.max()
    return x - np.log(np.exp(x).sum())


def row_of(logprobs: dict[int, Logprob], vocabulary: int) -> np.ndarray:
    assert len(logprobs) == vocabulary
    return np.array([logprobs[i].logprob for i in range(vocabulary)])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            tiny_models.write_model(name, root / name)
        return root / name

    return folder


def model_len(name: str) -> dict[str, int]:
    """Room for the longest prompt and its output: a dynamic rope goes past what config.json promises only if
    told.
    """
    longest = max(p["n"] for p in GOLDEN[name]["prompts"])
    return {"max_model_len": longest + NEW_TOKENS}


@pytest.mark.parametrize("name", GOLDEN)
def test_float32_matches_transformers(name: str, folder_of: Callable[[str], Path]) -> None:
    """All prompts as one batch: greedy ids exactly, and the log probabilities of the whole vocabulary."""
    entry = GOLDEN[name]
    engine = open_engine(folder_of(name), **model_len(name))
    V = engine.info()["vocab_size"]
    params = greedy(NEW_TOKENS, ignore_eos=True, logprobs=V)
    outputs = engine.generate([p["ids"] for p in entry["prompts"]], params)
    for prompt, output in zip(entry["prompts"], outputs, strict=True):
        assert tokens_of(output) == prompt["greedy_ids"]
        first = output.outputs[0].logprobs
        assert first is not None
        np.testing.assert_allclose(row_of(first[0], V), log_softmax(prompt["last_logits"]), rtol=0, atol=1e-3)
    check_all_blocks_are_back(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 33, "block_size": 4},
        {"max_num_batched_tokens": 8, "block_size": 1},
        {"max_num_batched_tokens": 64, "block_size": 32, "scheduler": "static"},
        {"max_num_batched_tokens": 1, "block_size": 7, "enable_prefix_caching": False},
    ],
    ids=lambda o: "-".join(str(v) for v in o.values()),
)
@pytest.mark.parametrize("name", GOLDEN)
def test_chunks_and_blocks_change_nothing(
    name: str, options: dict[str, Any], folder_of: Callable[[str], Path]
) -> None:
    engine = open_engine(folder_of(name), num_blocks=1000, num_threads=1, **options, **model_len(name))
    prompts = GOLDEN[name]["prompts"]
    outputs = engine.generate([p["ids"] for p in prompts], greedy(NEW_TOKENS, ignore_eos=True))
    assert [tokens_of(o) for o in outputs] == [p["greedy_ids"] for p in prompts]
    check_all_blocks_are_back(engine)


@pytest.mark.parametrize("name", GOLDEN)
def test_bfloat16_is_as_close_as_bfloat16_can_be(name: str, folder_of: Callable[[str], Path]) -> None:
    """Within twice of what transformers' own bfloat16 differs from its float32: two computations that round
    at different places may each be that far off, in opposite directions.
    """
    entry = GOLDEN[name]
    engine = open_engine(folder_of(name), dtype="bfloat16", **model_len(name))
    V = engine.info()["vocab_size"]
    outputs = engine.generate([p["ids"] for p in entry["prompts"]], greedy(1, logprobs=V))
    for prompt, output in zip(entry["prompts"], outputs, strict=True):
        first = output.outputs[0].logprobs
        assert first is not None
        # Centred, because log_softmax moves all entries by the change of one sum.
        mine, reference = row_of(first[0], V), np.asarray(prompt["last_logits"])
        difference = (mine - mine.mean()) - (reference - reference.mean())
        assert np.abs(difference).max() <= 2 * entry["bf16_compute_max_abs_diff"]


def test_the_features_matter() -> None:
    """The goldens can tell: leaving a feature out moves some logit far more than the tolerance above."""
    controls = {
        name: max(p["control_max_abs_diff"] for p in entry["prompts"])
        for name, entry in GOLDEN.items()
        if "control_max_abs_diff" in entry["prompts"][0]
    }
    assert len(controls) >= 10
    assert min(controls.values()) > 0.01, controls
