"""Exercise 16.1: the laws of continuous batching, with an engine that is played."""

from __future__ import annotations

import random
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
from conftest import Exercise


class World:
    """Plays the engine, and checks each step."""

    def __init__(self, module: ModuleType, seats: int, budget: int) -> None:
        self.module = module
        self.scheduler = module.Scheduler(seats, budget)
        self.seats, self.budget = seats, budget
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.outputs: dict[Any, int] = {}  # request -> tokens it still wants
        self.first_token: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.token_steps: dict[str, list[int]] = {}
        self.steps = 0

    def add(self, name: str, prompt: int, output: int) -> None:
        request = self.module.Request(name, prompt, known=prompt)
        self.outputs[request] = output
        self.token_steps[name] = []
        self.waiting.append(request)
        self.scheduler.add(request)

    def step(self) -> dict[str, int]:
        chunks = self.scheduler.schedule()
        self.steps += 1
        by_request = {chunk.request: chunk for chunk in chunks}
        assert len(by_request) == len(chunks), "a request has two chunks"
        assert all(chunk.count >= 1 for chunk in chunks), "a chunk is empty"
        used = sum(chunk.count for chunk in chunks)
        assert used <= self.budget, f"{used} tokens in a step of {self.budget}"

        decodes = [r for r in self.running if not r.is_prefill]
        left = self.budget - len(decodes)
        while self.waiting and len(self.running) < self.seats and left > 0:
            self.running.append(self.waiting.pop(0))
        running, waiting = (
            [request.name for request in queue] for queue in (self.scheduler.running, self.scheduler.waiting)
        )
        assert running == [r.name for r in self.running], "`running`, as it is and as it should be"
        assert waiting == [r.name for r in self.waiting], "`waiting`, as it is and as it should be"
        for request in decodes:
            assert request in by_request, f"{request.name} reads, and gets no token"
            assert by_request[request].count == 1
        prefills = [r for r in self.running if r.is_prefill]
        assert used == len(decodes) + min(left, sum(r.uncomputed for r in prefills)), "budget is left over"
        if prefills:
            oldest = prefills[0]
            right = min(-(-left // 2), oldest.uncomputed)
            got = by_request[oldest].count if oldest in by_request else 0
            assert got >= right, f"the oldest prefill got {got} tokens and has a right to {right}"
            shares = sorted(prefills[1:], key=lambda r: r.uncomputed)
            for first, second in pairwise(shares):
                if second in by_request:
                    served = by_request[first].count if first in by_request else 0
                    assert served == first.uncomputed, (
                        "a shorter prefill, or an older one as short, was passed over"
                    )
            if any(r not in by_request or by_request[r].count < r.uncomputed for r in prefills[1:]):
                assert got == right, "the others' half went to the oldest"

        for chunk in chunks:
            request = chunk.request
            assert request in self.running, f"{request.name} does not run"
            assert chunk.start == request.computed, "a token is computed twice or left out"
            assert chunk.count <= request.uncomputed, "a token that nobody knows"
            request.computed += chunk.count
        for request in list(by_request):
            if request.uncomputed == 0:
                self.take_token(request)
        return {chunk.request.name: chunk.count for chunk in chunks}

    def take_token(self, request: Any) -> None:
        self.first_token.setdefault(request.name, self.steps)
        self.token_steps[request.name].append(self.steps)
        request.known += 1
        self.outputs[request] -= 1
        if self.outputs[request] == 0:
            self.ended[request.name] = self.steps
            self.running.remove(request)
            self.scheduler.finish(request)

    def run(self, limit: int = 5000) -> None:
        while self.running or self.waiting:
            assert self.steps < limit, f"{[r.name for r in self.running]} never end"
            self.step()


@pytest.fixture
def module(exercise: Exercise) -> ModuleType:
    return exercise.python("scheduler.py")


def test_one_request(module: ModuleType) -> None:
    world = World(module, seats=4, budget=64)
    world.add("a", 10, 3)
    assert [world.step() for _ in range(3)] == [{"a": 10}, {"a": 1}, {"a": 1}]
    assert world.ended == {"a": 3}


def test_a_seat_is_taken_in_the_step_after_it_was_given_up(module: ModuleType) -> None:
    world = World(module, seats=2, budget=64)
    for name, output in (("a", 6), ("b", 2), ("c", 4), ("d", 1)):
        world.add(name, 1, output)
    world.run()
    assert world.first_token == {"a": 1, "b": 1, "c": 3, "d": 7}
    assert world.ended == {"a": 6, "b": 2, "c": 6, "d": 7}


def test_a_reader_does_not_wait_for_a_long_prompt(module: ModuleType) -> None:
    world = World(module, seats=8, budget=64)
    world.add("reader", 5, 100)
    for _ in range(10):
        world.step()
    world.add("long", 4000, 1)
    world.step()
    world.step()
    world.add("short", 5, 1)
    world.run()
    assert world.token_steps["reader"] == list(range(1, 101)), "a token in each step"
    assert world.first_token["short"] == 13, "in the step that it arrived before"
    assert world.first_token["long"] == 10 + 64


def test_a_long_prompt_does_not_wait_for_ever(module: ModuleType) -> None:
    world = World(module, seats=32, budget=64)
    world.add("long", 4000, 1)
    for i in range(400):
        world.add(f"question {2 * i}", 31, 2)
        world.add(f"question {2 * i + 1}", 31, 2)
        world.step()
    world.run()
    # Of what at most 31 decodes leave it gets half in each step.
    assert world.first_token["long"] <= 4000 // 17 + 1


@pytest.mark.parametrize("seed", range(20))
def test_any_traffic(module: ModuleType, seed: int) -> None:
    draw = random.Random(seed)
    budget = draw.choice([2, 3, 16, 64])
    world = World(module, seats=draw.randint(1, budget // 2), budget=budget)
    arriving = draw.randint(1, 40)
    for i in range(arriving):
        world.add(str(i), draw.choice([1, 2, 5, 30, 200]), draw.choice([1, 2, 10, 40]))
        for _ in range(draw.choice([0, 0, 1, 5])):
            world.step()
    world.run()
    assert len(world.ended) == arriving


def test_what_remains_counts_and_not_the_prompt(module: ModuleType) -> None:
    world = World(module, seats=8, budget=64)
    world.add("oldest", 4000, 1)
    world.add("almost", 70, 1)
    for _ in range(2):
        world.step()
    world.add("shorter prompt", 40, 1)
    assert world.step() == {"oldest": 32, "almost": 6, "shorter prompt": 26}


def test_two_schedulers_are_two(module: ModuleType) -> None:
    first, second = World(module, seats=2, budget=8), World(module, seats=2, budget=8)
    first.add("a", 3, 2)
    second.add("b", 4, 1)
    assert (first.step(), second.step()) == ({"a": 3}, {"b": 4})
