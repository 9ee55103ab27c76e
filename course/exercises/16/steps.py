"""Exercise 16.2: how many steps will it take?

Prompts of one token each, so that request i needs lengths[i] steps in a seat, and a budget that is large
enough for everybody. Requests are seated in the order of the list. The test asks the engine's own
schedulers.
"""

from __future__ import annotations

from collections.abc import Sequence


def static_steps(lengths: Sequence[int], seats: int) -> int:
    """The next `seats` requests are seated when the last of those before has ended."""
    raise NotImplementedError("Your turn")


def continuous_steps(lengths: Sequence[int], seats: int) -> int:
    """A seat is taken again in the step after it was given up."""
    raise NotImplementedError("Your turn")
