"""Exercise 21.1: time a kernel on a device that does not wait for you, and compare two kernels fairly.

A device has

    device.launch()   puts one call of the kernel into the device's queue and returns at once
    device.wait()     returns when all that is in the queue is done

and `clock()` gives the host's time in seconds. There may be work in the queue already when you are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Device(Protocol):
    def launch(self) -> None: ...
    def wait(self) -> None: ...


def seconds_of_calls(
    device: Device, clock: Callable[[], float], *, warm_up: int, rounds: int, calls: int
) -> list[float]:
    """`rounds` numbers: each is the mean time of one call, over `calls` calls between two waits.

    Before the first of them, `warm_up` calls run whose time nobody counts.
    """
    raise NotImplementedError("Your turn")


def summary(times: Sequence[float]) -> tuple[float, float, float]:
    """The median, the smallest and the largest. ValueError if there are no times."""
    raise NotImplementedError("Your turn")


def verdict(before: Sequence[float], after: Sequence[float]) -> str:
    """ "faster": all times after are below all before; "slower": all above; else "cannot tell"."""
    raise NotImplementedError("Your turn")
