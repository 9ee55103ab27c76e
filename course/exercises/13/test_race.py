"""Exercise 13.2: the same tokens as the engine, for any seed and position."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm import ops


def _race(exercise: Exercise, logits: Any, temperature: float, seed: int, position: int) -> int:
    function = exercise.library("race.cpp").race
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_double,
        ctypes.c_uint64,
        ctypes.c_int64,
    ]
    function.restype = ctypes.c_int32
    return int(function(logits.ctypes.data, logits.size, temperature, seed, position))


@pytest.mark.parametrize("size", [5, 64, 1001])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_it_draws_what_the_engine_draws(
    exercise: Exercise, size: int, temperature: float, shift: float
) -> None:
    rng = np.random.default_rng(size)
    logits = (3 * rng.standard_normal(size) + shift).astype(np.float32)
    logits[::3] = -np.inf
    seeds = [0, 1, 2**32 + 7, 2**64 - 1] * 5
    positions = [int(p) for p in rng.integers(0, 2**40, 20)]
    expected = ops.sample(np.tile(logits, (20, 1)), temperature=temperature, seeds=seeds, positions=positions)
    found = [
        _race(exercise, logits, temperature, seed, position)
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert found == expected.tolist()


def test_a_tiny_temperature_is_greedy(exercise: Exercise) -> None:
    logits = np.array([3, 7, 7.5, 1], np.float32)
    assert {_race(exercise, logits, 1e-6, 0, position) for position in range(50)} == {2}
