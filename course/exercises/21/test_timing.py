"""Exercise 21.1: against a device whose every microsecond is known."""

from __future__ import annotations

import pytest
from conftest import Exercise

LAUNCH, WAIT, KERNEL, COLD = 2e-6, 5e-6, 30e-6, 900e-6


class Queue:
    """A device with a clock of its own. The first call is cold."""

    def __init__(self, left_over: float = 0.0, kernel: float = KERNEL) -> None:
        self.now, self.free_at, self.kernel = 1.0, 1.0 + left_over, kernel
        self.calls = 0

    def launch(self) -> None:
        self.now += LAUNCH
        self.free_at = max(self.free_at, self.now) + (COLD if self.calls == 0 else self.kernel)
        self.calls += 1

    def wait(self) -> None:
        self.now = max(self.now, self.free_at) + WAIT

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("calls", [1, 20])
def test_a_call_takes_what_the_kernel_takes(exercise: Exercise, calls: int) -> None:
    queue = Queue()
    times = exercise.python("timing.py").seconds_of_calls(
        queue, queue.clock, warm_up=3, rounds=7, calls=calls
    )
    assert len(times) == 7
    assert queue.calls == 3 + 7 * calls
    for seconds in times:  # a launch and a wait are shared by the calls of a round
        assert seconds == pytest.approx(KERNEL + (LAUNCH + WAIT) / calls, rel=1e-6)


def test_what_others_left_in_the_queue_does_not_count(exercise: Exercise) -> None:
    queue = Queue(left_over=0.5)
    queue.calls = 1  # warm already
    times = exercise.python("timing.py").seconds_of_calls(queue, queue.clock, warm_up=0, rounds=3, calls=10)
    assert max(times) < 2 * KERNEL


def test_one_slow_call_does_not_move_the_median(exercise: Exercise) -> None:
    summary = exercise.python("timing.py").summary
    assert summary([3.0, 1.0, 2.0, 100.0]) == (2.5, 1.0, 100.0)
    assert summary((4.0,)) == (4.0, 4.0, 4.0)
    with pytest.raises(ValueError):  # noqa: PT011 - the message is the reader's
        summary([])


def test_times_that_overlap_decide_nothing(exercise: Exercise) -> None:
    verdict = exercise.python("timing.py").verdict
    assert verdict([10.0, 11.0, 12.0], [8.0, 9.0, 7.0]) == "faster"
    assert verdict([10.0, 11.0, 12.0], [13.0, 14.0]) == "slower"
    # The median is lower by a tenth, and still: the slowest run after was slower than the fastest before.
    assert verdict([10.0, 11.0, 12.0], [9.0, 9.9, 10.5]) == "cannot tell"
    assert verdict([10.0, 11.0], [11.0, 12.0]) == "cannot tell"
    assert verdict([10.0, 11.0], [9.0, 10.0]) == "cannot tell"
