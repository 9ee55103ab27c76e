"""Exercise 12.1: silu(gate) · up, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise


@pytest.mark.parametrize(("blocks", "threads"), [(1, 64), (3, 128), (40, 96)])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 96), (7, 131)])
def test_the_gate_opens(exercise: Exercise, rows: int, width: int, blocks: int, threads: int) -> None:
    rng = np.random.default_rng(width)
    gate_up = (3 * rng.standard_normal((rows, 2 * width))).astype(np.float32)
    gate_up[0, 0] = -200  # e^200 is infinite in float32, and silu is 0
    gate_up[-1, width - 1] = 200 if rows > 1 else gate_up[0, 0]  # and e^200 / e^200 would be no number
    out = np.full((rows, width), np.nan, np.float32)
    exercise.kernels("act_mul.cu")("act_mul", gate_up, out, rows, width, blocks, threads)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)
