"""Exercise 15.2: the same plan as the engine's scheduler, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm import _core


@pytest.mark.parametrize(
    ("seats", "budget", "longest"), [(1, 100, 30), (3, 100, 30), (4, 16, 50), (8, 8, 20), (20, 64, 9)]
)
def test_it_plans_what_the_engine_plans(exercise: Exercise, seats: int, budget: int, longest: int) -> None:
    module = exercise.python("static_scheduler.py")
    mine = module.StaticScheduler(seats, budget)
    allocator = _core.BlockAllocator(num_blocks=1000, block_size=16, enable_prefix_caching=False)
    theirs = _core.Scheduler(
        "static", allocator, max_num_seqs=seats, max_num_batched_tokens=budget, max_model_len=500
    )
    rng = np.random.default_rng(seats)
    answers: dict[str, int] = {}
    pairs = {}
    arrived = 0
    for step in range(1000):
        if step % 5 == 0 and arrived < 16:  # three come now, the others while these run
            for _ in range(3):
                prompt, name = int(rng.integers(1, longest)), str(arrived)
                answers[name] = int(rng.integers(1, 12))
                pairs[name] = module.Request(prompt), _core.Request(name, [1] * prompt, 400, arrival=arrived)
                mine.add(pairs[name][0])
                theirs.add(pairs[name][1])
                arrived += 1
        if not theirs.has_unfinished():
            break
        plan = theirs.schedule()
        expected = [(chunk.request.id, chunk.start, chunk.count) for chunk in plan.chunks]
        names = {id(request): name for name, (request, _) in pairs.items()}
        found = [(names[id(request)], start, count) for request, start, count in mine.schedule()]
        assert found == expected, f"step {step + 1}: yours, then the engine's"
        theirs.commit(plan)
        for name, start, count in expected:
            request, core = pairs[name]
            request.computed = start + count
            if request.computed < request.tokens:
                continue
            request.tokens += 1
            core.append(0)
            if core.num_output_tokens == answers[name]:
                mine.remove(request)
                theirs.remove(core)
    assert arrived >= 15
    assert not theirs.has_unfinished()
    assert not mine.running
