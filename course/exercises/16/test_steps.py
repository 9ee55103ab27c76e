"""Exercise 16.2: the number of steps, against the engine's schedulers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from conftest import Exercise
from tiny_vllm import _core


def steps_of_engine(policy: str, lengths: Sequence[int], seats: int) -> int:
    blocks = _core.BlockAllocator(10_000, 16, False)
    scheduler = _core.Scheduler(
        policy, blocks, max_num_seqs=seats, max_num_batched_tokens=1000, max_model_len=1000
    )
    for i, length in enumerate(lengths):
        scheduler.add(_core.Request(str(i), [0], length, arrival=i))
    steps = 0
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        scheduler.commit(plan)
        steps += 1
        for chunk in plan.chunks:
            chunk.request.append(0)
            if chunk.request.num_tokens == chunk.request.max_total_tokens:
                scheduler.remove(chunk.request)
    return steps


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("policy", ["static", "continuous"])
def test_as_many_steps_as_the_engine_takes(exercise: Exercise, policy: str, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 60) for _ in range(draw.randint(1, 30))]
    seats = draw.randint(1, 6)
    answer = getattr(exercise.python("steps.py"), f"{policy}_steps")(list(lengths), seats)
    assert answer == steps_of_engine(policy, lengths, seats)
