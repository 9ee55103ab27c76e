"""Exercise 23.2: the error is bounded, on real weights too."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm import _core
from tiny_vllm.bundled import bundled_model_folder


def test_two_numbers_share_a_byte(exercise: Exercise) -> None:
    int4 = exercise.python("int4.py")
    packed, scales = int4.quantise(np.array([[7, -7, 0, 3], [0.5, 0, -0.25, 0.11]], np.float32), 2)
    assert packed.dtype == np.uint8
    assert packed.tolist() == [[15 | 1 << 4, 8 | 15 << 4], [15 | 8 << 4, 1 | (8 + 3) << 4]]
    np.testing.assert_allclose(scales, [[1, 3 / 7], [0.5 / 7, 0.25 / 7]], rtol=1e-6)


@pytest.mark.parametrize("group", [2, 32, 64, 576])
def test_the_error_is_at_most_half_a_scale(exercise: Exercise, group: int) -> None:
    int4 = exercise.python("int4.py")
    weight = _core.Checkpoint(str(bundled_model_folder())).numpy("model.layers.3.self_attn.k_proj.weight")
    packed, scales = int4.quantise(weight, group)
    assert packed.shape == (192, 288)
    assert scales.shape == (192, 576 // group)
    assert scales.dtype == np.float32
    near = int4.dequantise(packed, scales)
    assert near.dtype == np.float32
    error = np.abs(near - weight).reshape(192, -1, group)
    assert (error <= scales[..., None] * 0.5001 + 1e-9).all()


def test_what_can_be_said_exactly_is(exercise: Exercise) -> None:
    int4 = exercise.python("int4.py")
    rng = np.random.default_rng(0)
    weight = rng.integers(-7, 8, (5, 64)).astype(np.float32) * np.float32(0.25)
    weight[:, ::16] = 1.75  # every group has its 7, so that the scale is 0.25
    np.testing.assert_allclose(int4.dequantise(*int4.quantise(weight, 16)), weight, rtol=1e-6)


def test_an_outlier_spoils_its_own_group_only(exercise: Exercise) -> None:
    int4 = exercise.python("int4.py")
    weight = np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32)
    spoilt = weight.copy()
    spoilt[0, 5] = 1000
    near, near_spoilt = (int4.dequantise(*int4.quantise(w, 16)) for w in (weight, spoilt))
    np.testing.assert_array_equal(near[0, 16:], near_spoilt[0, 16:])
    assert near_spoilt[0, 5] == pytest.approx(1000)
    assert not near_spoilt[0, :5].any()  # the others are lost


def test_zeros_and_bad_groups(exercise: Exercise) -> None:
    int4 = exercise.python("int4.py")
    weight = np.zeros((2, 8), np.float32)
    weight[1, 0] = 3
    near = int4.dequantise(*int4.quantise(weight, 4))
    np.testing.assert_allclose(near, weight)
    for group in (3, 5, 16):
        with pytest.raises(ValueError):  # noqa: PT011 - the message is the reader's
            int4.quantise(weight, group)


def test_bits(exercise: Exercise) -> None:
    bits = exercise.python("int4.py").bits_a_weight
    assert bits(32) == 4.5
    assert bits(64) == 4.25
    assert bits(32, scale_bits=32) == 5.0
