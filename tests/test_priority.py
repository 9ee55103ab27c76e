"""Requests with priorities: who goes first. What the scheduler does is in test_scheduler.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import check_all_blocks_are_back, exact, finish, greedy, open_engine, prompt_of, solo
from tiny_vllm import AsyncEngine
from tiny_vllm.errors import InvalidRequestError


@pytest.mark.parametrize("scheduler", ["continuous", "static"])
def test_the_smaller_number_goes_first(scheduler: str, rand_folder: Path) -> None:
    engine = open_engine(rand_folder, scheduling_policy="priority", scheduler=scheduler, max_num_seqs=1)
    for name, priority in (("late", 5), ("first", -3), ("second", 0), ("third", 0)):
        engine.add_request(name, prompt_of(6), greedy(3), priority)
    order = []
    while engine.has_unfinished_requests():
        order += [output.request_id for output in engine.step() if output.finished]
    assert order == ["first", "second", "third", "late"]
    check_all_blocks_are_back(engine)


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 2}, {"num_blocks": 8}, {"num_blocks": 8, "max_num_seqs": 3}]
)
def test_giving_way_changes_no_answer(options: dict[str, Any], rand_folder: Path) -> None:
    """Ones that run are preempted for a more urgent one, also while a step of theirs is under way."""
    prompts = {f"p{i}": prompt_of(9 + 4 * i, seed=i) for i in range(5)}
    engine = open_engine(rand_folder, scheduling_policy="priority", **options)
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.add_request(name, prompt, greedy(20, logprobs=1), priority=-i)
        for _ in range(4):
            engine.step()
    outputs = finish(engine)
    assert engine.metrics()["num_preemptions"] > 0
    for name, prompt in prompts.items():
        assert exact(outputs[name]) == exact(solo(rand_folder, [prompt], greedy(20, logprobs=1))[0])
    check_all_blocks_are_back(engine)


def test_all_ways_to_ask(rand_folder: Path) -> None:
    engine = open_engine(rand_folder, scheduling_policy="priority", record_events=True)
    engine.generate([[1], [2]], greedy(1), priority=[4, -4])
    engine.generate([3], greedy(1), priority=7)
    list(engine.stream([4], greedy(1), priority=8))
    list(engine.start_stream([5], greedy(1), priority=9))

    async def in_a_loop() -> None:
        async with AsyncEngine.from_engine(engine) as served:
            async for _ in served.generate([6], greedy(1), priority=10):
                pass
            async for _ in served.stream([6], greedy(1), priority=11):
                pass

    import asyncio

    asyncio.run(in_a_loop())
    assert [s["priority"] for s in engine.events().sequences] == [4, -4, 7, 8, 9, 10, 11]


def test_what_is_refused(rand_folder: Path) -> None:
    fcfs, ranked = open_engine(rand_folder), open_engine(rand_folder, scheduling_policy="priority")
    with pytest.raises(
        InvalidRequestError, match=r'priority is 1, but scheduling_policy is fcfs; .*"priority"'
    ):
        fcfs.add_request("a", [1], greedy(1), priority=1)
    fcfs.add_request("a", [1], greedy(1), priority=0)
    wrong: list[Any] = [1.5, "1", None, True, 2**63]
    for value in wrong:
        with pytest.raises(InvalidRequestError, match="priority must be an integer of 64 bits"):
            ranked.add_request("a", [1], greedy(1), priority=value)
    with pytest.raises(InvalidRequestError, match="priority has 3 entries for 2 prompts"):
        ranked.generate([[1], [2]], greedy(1), priority=[1, 2, 3])
    with pytest.raises(InvalidRequestError, match="scheduling_policy must be one of fcfs, priority"):
        open_engine(rand_folder, scheduling_policy="fair")
    ranked.add_request("a", [1], greedy(1), priority=-(2**63))
    assert len(finish(ranked)) == 1
