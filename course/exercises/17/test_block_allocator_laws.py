"""Exercise 17.1: the laws of the block allocator, for the one in Python and the one in C++."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conftest import Exercise
from tiny_vllm.course.lab import pointer


class InCpp:
    """block_allocator.cpp, with the functions of block_allocator.py."""

    def __init__(self, library: ctypes.CDLL, num_blocks: int) -> None:
        self.library = library
        library.make.restype = ctypes.c_void_p
        for function in (library.allocate, library.release):
            function.restype = ctypes.c_bool
        self.blocks = ctypes.c_void_p(library.make(num_blocks))

    def __del__(self) -> None:
        self.library.destroy(self.blocks)

    def num_free(self) -> int:
        return int(self.library.num_free(self.blocks))

    def allocate(self, count: int) -> list[int] | None:
        table = np.full(count, -1, np.int32)
        if self.library.allocate(self.blocks, pointer(table), count):
            return table.tolist()
        assert (table == -1).all(), "a refused call wrote into the table"
        return None

    def release(self, table: Sequence[int]) -> None:
        if not self.library.release(self.blocks, pointer(np.array(table, np.int32)), len(table)):
            raise ValueError


def refuses(blocks: Any, table: Sequence[int]) -> bool:
    try:
        blocks.release(table)
    except ValueError:
        return True
    return False


@pytest.fixture(params=["python", "cpp"])
def make(request: pytest.FixtureRequest, exercise: Exercise) -> Any:
    if request.param == "python":
        return exercise.python("block_allocator.py").BlockAllocator
    library = exercise.library("block_allocator.cpp")
    return lambda num_blocks: InCpp(library, num_blocks)


def test_each_block_once(make: Any) -> None:
    blocks = make(5)
    assert blocks.num_free() == 5
    table = blocks.allocate(2) + blocks.allocate(3)
    assert sorted(table) == [0, 1, 2, 3, 4]
    assert blocks.num_free() == 0
    blocks.release(table)
    assert sorted(blocks.allocate(5)) == [0, 1, 2, 3, 4]


def test_all_or_nothing(make: Any) -> None:
    blocks = make(3)
    first = blocks.allocate(2)
    assert blocks.allocate(2) is None
    assert blocks.num_free() == 1, "a refused call took something"
    assert blocks.allocate(0) == []
    second = blocks.allocate(1)
    assert sorted(first + second) == [0, 1, 2]


def test_a_double_release_is_refused(make: Any) -> None:
    blocks = make(4)
    first, second = blocks.allocate(2), blocks.allocate(1)
    blocks.release(first)
    for wrong in (first, [*second, first[0]], [second[0], second[0]], [-1], [4], [second[0], 4]):
        assert refuses(blocks, wrong), f"a release of {wrong} was not refused"
        assert blocks.num_free() == 3, f"a refused release of {wrong} changed something"
    blocks.release(second)
    assert sorted(blocks.allocate(4)) == [0, 1, 2, 3]
    assert blocks.allocate(1) is None, "a block was given twice"
    for wrong in ([-1], [-4], [4]):  # in Python, -1 is the last one of a list
        assert refuses(blocks, wrong), f"a release of {wrong} was not refused"
    assert blocks.num_free() == 0


def test_two_allocators_are_two(make: Any) -> None:
    first, second = make(3), make(2)
    table = first.allocate(3)
    assert second.num_free() == 2
    assert sorted(second.allocate(2)) == [0, 1]
    first.release(table)
    assert second.allocate(1) is None


@pytest.mark.parametrize("num_blocks", [1, 7, 64])
def test_a_random_walk_keeps_the_books(make: Any, num_blocks: int) -> None:
    draw = random.Random(num_blocks)
    blocks = make(num_blocks)
    tables: list[list[int]] = []
    for _ in range(2000):
        owned = [block for table in tables for block in table]
        what = draw.random()
        if what < 0.45:
            count = draw.randint(0, num_blocks // 2 + 1)
            table = blocks.allocate(count)
            if count > num_blocks - len(owned):
                assert table is None
            else:
                assert len(table) == count
                tables.append(table)
        elif what < 0.85 and tables:
            table = tables.pop(draw.randrange(len(tables)))
            draw.shuffle(table)
            blocks.release(table)
        elif tables:  # somebody gives back what he does not own
            free = sorted(set(range(num_blocks)) - set(owned))
            if free:
                assert refuses(blocks, [*draw.choice(tables), draw.choice(free)])
        owned = [block for table in tables for block in table]
        assert len(set(owned)) == len(owned), "a block is in two tables"
        assert all(0 <= block < num_blocks for block in owned)
        assert blocks.num_free() + len(owned) == num_blocks, "free + owned is not all"


def test_a_freed_block_goes_to_somebody_else(make: Any) -> None:
    """What is in a block is not its business: a new owner finds what the old one has left."""
    blocks = make(2)
    first = blocks.allocate(2)
    blocks.release(first[:1])
    assert blocks.allocate(1) == first[:1]
