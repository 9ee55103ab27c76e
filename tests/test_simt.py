"""course/kernels/simt.h: what a GPU does, its threads on a CPU do too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import packaging_steps as steps
import pytest
from helpers import DEVICE
from tiny_vllm.course.lab import Kernels
from tiny_vllm.errors import Error

Array = npt.NDArray[np.int32]


@pytest.fixture(scope="module")
def checks() -> Kernels:
    return Kernels(steps.ROOT / "tests" / "data" / "simt_checks.cu", DEVICE)


def run(checks: Kernels, which: int, out: Array) -> Array:
    checks("check", np.array([which], np.int32), out, out.size)
    return out


def zeros(n: int) -> Array:
    return np.zeros(n, np.int32)


def test_every_thread_runs_once_with_its_own_index(checks: Kernels) -> None:
    expected = (1000 * np.arange(12)[:, None] + np.arange(24)).ravel()
    np.testing.assert_array_equal(run(checks, 0, zeros(288)), expected)


def test_shuffles_read_the_lane_they_name(checks: Kernels) -> None:
    t = np.arange(64)
    down = np.where(t % 32 + 10 < 32, t + 10, t)  # beyond the warp: the own value
    same = t // 32 * 32 + 35 % 32
    np.testing.assert_array_equal(run(checks, 1, zeros(192)), np.concatenate([t ^ 5, down, same]))


def test_nobody_passes_a_barrier_before_all_have_come(checks: Kernels) -> None:
    expected = np.tile((np.arange(96) + 96) % 96 + 96, 2)
    np.testing.assert_array_equal(run(checks, 2, zeros(192)), expected)


def test_ended_threads_are_not_waited_for(checks: Kernels) -> None:
    np.testing.assert_array_equal(run(checks, 3, zeros(40)), np.arange(40)[::-1])


def test_atomic_additions_are_all_counted(checks: Kernels) -> None:
    assert run(checks, 4, zeros(1))[0] == 7 * 33


def test_a_warp_waits_for_its_own(checks: Kernels) -> None:
    np.testing.assert_array_equal(run(checks, 5, zeros(64)), np.arange(64) ^ 1)


@pytest.mark.cpu_only
def test_a_barrier_that_not_all_reach_is_reported(checks: Kernels) -> None:
    with pytest.raises(Error, match="deadlock"):
        run(checks, 6, zeros(64))
    assert run(checks, 4, zeros(1))[0] == 7 * 33, "and the next launch is not harmed"


def test_a_block_that_is_too_large_is_refused(checks: Kernels) -> None:
    with pytest.raises(Error, match=r"simt_checks\.cu: check: launch"):
        run(checks, 7, zeros(1))
