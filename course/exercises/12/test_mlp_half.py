"""Exercise 12.2: the MLP of a layer, against the engine's ops, with the small model's weights."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm import _core, ops
from tiny_vllm.bundled import bundled_model_folder

EPS = 1e-5


@pytest.mark.parametrize("layer", [3, 20])
@pytest.mark.parametrize("rows", [1, 4])
def test_it_is_the_engines(exercise: Exercise, layer: int, rows: int) -> None:
    checkpoint = _core.Checkpoint(str(bundled_model_folder()))
    at = f"model.layers.{layer}."
    norm = checkpoint.numpy(at + "post_attention_layernorm.weight")
    gate, up, down = (checkpoint.numpy(f"{at}mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    residual = 4 * np.random.default_rng(layer).standard_normal((rows, norm.size)).astype(np.float32)
    residual[0] /= 1000  # its mean of squares is about eps
    gated = ops.norm_matmul(residual, norm, np.concatenate([gate, up]), eps=EPS, activation="silu")
    expected = ops.matmul_add(residual, gated, down)
    given = residual.copy()
    result = exercise.python("mlp_half.py").mlp_half(residual, norm, gate, up, down, EPS)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(residual, given)
