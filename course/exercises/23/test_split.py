"""Exercise 23.3: the parts add up to the whole, on the weights of a real layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm import _core, ops
from tiny_vllm.bundled import bundled_model_folder


def layer() -> tuple[Any, Any, Any]:
    checkpoint = _core.Checkpoint(str(bundled_model_folder()))
    gate, up, down = (checkpoint.numpy(f"model.layers.4.mlp.{n}_proj.weight") for n in ("gate", "up", "down"))
    return (
        np.random.default_rng(0).standard_normal((3, 576)).astype(np.float32),
        np.concatenate([gate, up]),
        down,
    )


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_the_parts_add_up(exercise: Exercise, gpus: int) -> None:
    module = exercise.python("split.py")
    x, gate_up, down = layer()
    parts = module.split(gate_up, down, gpus)
    assert [(a.shape, b.shape) for a, b in parts] == [((3072 // gpus, 576), (576, 1536 // gpus))] * gpus
    expected = ops.matmul(ops.act_mul(ops.matmul(x, gate_up)), down)
    found = sum(module.part(x, *mine) for mine in parts)
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


def test_it_must_be_a_multiple(exercise: Exercise) -> None:
    _, gate_up, down = layer()
    with pytest.raises(ValueError):  # noqa: PT011 - the message is the reader's
        exercise.python("split.py").split(gate_up, down, 5)


def test_bytes(exercise: Exercise) -> None:
    bytes_sent = exercise.python("split.py").bytes_sent
    assert bytes_sent(rows=1, dim=2048, layers=16, gpus=2) == 131_072
    assert bytes_sent(rows=1, dim=2048, layers=16, gpus=8) == 229_376
    assert bytes_sent(rows=64, dim=2048, layers=16, gpus=4) == 64 * 196_608
    assert bytes_sent(rows=1, dim=2048, layers=16, gpus=1) == 0
