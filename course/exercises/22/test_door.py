"""Exercise 22.1: who gets in, who waits, who is refused, and that no place is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from conftest import Exercise


class House:
    def __init__(self, exercise: Exercise, inside: int, waiting: int) -> None:
        module = exercise.python("door.py")
        self.Busy: type[Exception] = module.Busy
        self.door = module.Door(inside=inside, waiting=waiting)
        self.entered: list[str] = []
        self.inside = self.most = 0

    async def visit(self, name: str, leave: asyncio.Event | None = None) -> None:
        async with self.door:
            self.entered.append(name)
            self.inside += 1
            self.most = max(self.most, self.inside)
            try:
                if leave is not None:
                    await leave.wait()
            finally:
                self.inside -= 1


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 5))


def test_some_get_in_some_wait_and_the_rest_is_refused(exercise: Exercise) -> None:
    async def test() -> None:
        house, leave = House(exercise, 2, 3), asyncio.Event()
        tasks = [asyncio.create_task(house.visit(name, leave)) for name in "abcdefg"]
        await settle()
        assert house.entered == ["a", "b"]
        assert [t.done() for t in tasks] == [False] * 5 + [True] * 2
        assert all(isinstance(t.exception(), house.Busy) for t in tasks[5:])
        leave.set()
        await asyncio.gather(*tasks[:5])
        assert house.entered == list("abcde")
        assert house.most == 2
        await house.visit("again")

    run(test)


def test_an_error_gives_the_place_back(exercise: Exercise) -> None:
    async def test() -> None:
        house = House(exercise, 1, 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                async with house.door:
                    raise ZeroDivisionError
        await house.visit("a")

    run(test)


def test_who_is_cancelled_while_waiting_leaves_the_queue(exercise: Exercise) -> None:
    async def test() -> None:
        house, leave = House(exercise, 1, 2), asyncio.Event()
        tasks = [asyncio.create_task(house.visit(name, leave)) for name in "abc"]
        await settle()
        tasks[1].cancel()
        await settle()
        tasks.append(asyncio.create_task(house.visit("d", leave)))  # there is room in the queue again
        await settle()
        assert not tasks[3].done()
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert house.entered == ["a", "c", "d"]
        await house.visit("again")

    run(test)


def test_who_is_cancelled_when_the_place_has_just_come_passes_it_on(exercise: Exercise) -> None:
    async def test() -> None:
        house = House(exercise, 1, 2)
        leave, stay = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(house.visit("a", leave))
        second = asyncio.create_task(house.visit("b", stay))
        third = asyncio.create_task(house.visit("c", stay))
        await settle()

        # In one turn of the loop: the first leaves, and the second is cancelled before it can run.
        await house.door.__aexit__(None, None, None)
        second.cancel()
        await settle()
        assert house.entered == ["a", "c"]
        first.cancel()
        third.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)

    run(test)


def test_nobody_overtakes(exercise: Exercise) -> None:
    async def test() -> None:
        house, leave = House(exercise, 1, 5), asyncio.Event()
        first = asyncio.create_task(house.visit("a", leave))
        second = asyncio.create_task(house.visit("b"))
        await settle()
        leave.set()
        # The place of a is free before b has woken up; c must not take it.
        await asyncio.gather(first, house.visit("c"), second)
        assert house.entered == ["a", "b", "c"]

    run(test)


def test_two_doors_are_two(exercise: Exercise) -> None:
    async def test() -> None:
        module, leave = exercise.python("door.py"), asyncio.Event()
        first, second = module.Door(inside=1, waiting=1), module.Door(inside=1, waiting=1)

        async def visit(door: Any) -> None:
            async with door:
                await leave.wait()

        tasks = [asyncio.create_task(visit(door)) for door in (first, first, second, second)]
        await settle()
        assert not any(task.done() for task in tasks)
        leave.set()
        await asyncio.gather(*tasks)

    run(test)
