"""course/kernels/simt.h: what a GPU does, its threads on a CPU do too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


@pytest.mark.parametrize("which", [7, 10, 11, 12])
def test_what_no_gpu_launches_is_refused(checks: Kernels, which: int) -> None:
    with pytest.raises(Error, match=r"simt_checks\.cu: check: launch"):
        run(checks, which, zeros(1))


def test_a_shuffle_waits_for_the_lanes_of_its_mask_alone(checks: Kernels) -> None:
    t = np.arange(32)
    np.testing.assert_array_equal(run(checks, 8, zeros(32)), np.where(t < 16, t ^ 1, 31))


def test_a_thread_may_have_large_arrays_of_its_own(checks: Kernels) -> None:
    np.testing.assert_array_equal(run(checks, 9, zeros(32)), np.arange(32))


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("which", "problem"),
    [
        (13, "thread 3"),
        (14, "a kernel cannot launch another one"),
        (15, "wrote behind the end of an array of 5 elements"),
        (16, "wrote before the beginning of an array"),
    ],
)
def test_what_goes_wrong_in_a_kernel_is_told(checks: Kernels, which: int, problem: str) -> None:
    with pytest.raises(Error, match=problem):
        run(checks, which, zeros(5))
    assert run(checks, 4, zeros(1))[0] == 7 * 33, "and the next launch is not harmed"


@pytest.mark.cpu_only
def test_memory_that_nobody_filled_is_not_zero(checks: Kernels) -> None:
    found = run(checks, 17, zeros(3))
    assert (found < 0).all()
    assert np.isnan(found.view(np.float32)).all()


@pytest.mark.cpu_only
def test_a_calculation_behind_the_end_is_seen_although_it_gives_nan(checks: Kernels) -> None:
    with pytest.raises(Error, match="wrote behind the end"):
        run(checks, 18, zeros(5))


@pytest.mark.cpu_only
def test_two_python_threads_take_turns(checks: Kernels) -> None:
    expected = np.tile((np.arange(96) + 96) % 96 + 96, 2)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: run(checks, 2, zeros(192)), range(20)):
            np.testing.assert_array_equal(found, expected)


TEMPLATE = """
#include "simt.h"
template <int kNone>
__global__ void keeps(int* out) {
  __shared__ int before, room[%d], behind;
  if (threadIdx.x == 0) before = behind = 5;
  __syncthreads();
  room[threadIdx.x] = 7;
  __syncthreads();
  out[threadIdx.x] = room[threadIdx.x] * before * behind;
}
extern "C" const char* check(int* out, int n) {
  return report([&] {
    DeviceArray<int> result(out, n);
    launch(keeps<0>, 1, n, result.get());
    result.copy_to(out);
  });
}
"""


@pytest.mark.cpu_only
def test_shared_memory_is_not_shared_by_libraries(tmp_path: Path) -> None:
    for size in (1, 1000):
        source = tmp_path / f"of_{size}.cu"
        source.write_text(TEMPLATE % size)
        out = zeros(size)
        Kernels(source, "cpu")("check", out, size)
        np.testing.assert_array_equal(out, 7 * 5 * 5)
