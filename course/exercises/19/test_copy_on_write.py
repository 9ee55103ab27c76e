"""Exercise 19.2: forks that go their own ways, in a memory that anybody could spoil."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from conftest import Exercise
from tiny_vllm import _core

SIZE = 4


class Blocks:
    """The engine's allocator, without make_writable."""

    def __init__(self, num_blocks: int) -> None:
        self.inner = _core.BlockAllocator(num_blocks, SIZE, False)

    @property
    def free_blocks(self) -> int:
        return self.inner.free_blocks

    def allocate(self, count: int) -> list[int] | None:
        return self.inner.allocate(count)

    def release(self, table: Sequence[int]) -> None:
        self.inner.release(table)

    def ref_count(self, block: int) -> int:
        return self.inner.ref_count(block)


class World:
    def __init__(self, make_writable: Any, num_blocks: int) -> None:
        self.make_writable = make_writable
        self.blocks = Blocks(num_blocks)
        self.memory = [["?"] * SIZE for _ in range(num_blocks)]
        self.sequences: list[tuple[list[int], list[str]]] = [([], [])]  # table, text
        self.copies = 0

    def copy(self, source: int, target: int) -> None:
        assert self.blocks.ref_count(source) >= 1, "copies a block that it has given away"
        assert self.blocks.ref_count(target) == 1, "copies into a block that is not its own"
        self.memory[target] = list(self.memory[source])
        self.copies += 1

    def write(self, n: int, word: str) -> bool:
        table, text = self.sequences[n]
        before = list(table), self.blocks.free_blocks
        if not self.make_writable(self.blocks, table, len(text), SIZE, self.copy):
            assert (table, self.blocks.free_blocks) == before, "a refused call changed something"
            assert self.blocks.free_blocks == 0, "refused, with a free block"
            self.check()
            return False
        block = table[len(text) // SIZE]
        assert self.blocks.ref_count(block) == 1, "writes to a block that others read"
        self.memory[block][len(text) % SIZE] = word
        text.append(word)
        self.check()
        return True

    def fork(self, n: int) -> None:
        table, text = self.sequences[n]
        self.blocks.inner.share(table)
        self.sequences.append((list(table), list(text)))

    def end(self, n: int) -> None:
        self.blocks.release(self.sequences.pop(n)[0])
        self.check()

    def check(self) -> None:
        for table, text in self.sequences:
            read = [self.memory[table[p // SIZE]][p % SIZE] for p in range(len(text))]
            assert read == text, f"reads {' '.join(read)}, but has written {' '.join(text)}"
            assert len(table) == -(-len(text) // SIZE), "a block too many"
        owners: dict[int, int] = {}
        for table, _text in self.sequences:
            for block in table:
                owners[block] = owners.get(block, 0) + 1
        assert all(self.blocks.ref_count(block) == count for block, count in owners.items())
        assert self.blocks.inner.owned_blocks == len(owners), "a block is lost"


@pytest.fixture
def make_writable(exercise: Exercise) -> Any:
    return exercise.python("copy_on_write.py").make_writable


def test_one_sequence_never_copies(make_writable: Any) -> None:
    world = World(make_writable, 3)
    for i in range(12):
        assert world.write(0, str(i))
    assert not world.write(0, "one too many")
    assert world.copies == 0


def test_a_fork_copies_the_block_that_is_not_full(make_writable: Any) -> None:
    world = World(make_writable, 8)
    for word in ("we", "all", "went", "to", "the", "old"):
        world.write(0, word)
    world.fork(0)
    world.write(1, "school")
    assert world.copies == 1
    world.write(0, "house")
    assert world.copies == 1, "the last owner of a block need not copy"
    assert world.sequences[0][0][0] == world.sequences[1][0][0], "the full block is still shared"


def test_after_a_full_block_nothing_is_copied(make_writable: Any) -> None:
    world = World(make_writable, 8)
    for i in range(8):
        world.write(0, str(i))
    for _ in range(2):
        world.fork(0)
    for n in range(3):
        world.write(n, f"of {n}")
    assert world.copies == 0


def test_without_a_free_block_nothing_happens(make_writable: Any) -> None:
    world = World(make_writable, 1)
    world.write(0, "one")
    world.fork(0)
    assert not world.write(1, "two")
    world.end(0)
    assert world.write(0, "two"), "now it is the only owner"


@pytest.mark.parametrize("seed", range(10))
def test_any_family(make_writable: Any, seed: int) -> None:
    draw = random.Random(seed)
    world = World(make_writable, draw.choice([5, 20]))
    for i in range(400):
        what = draw.random()
        n = draw.randrange(len(world.sequences))
        if what < 0.1 and len(world.sequences) < 6:
            world.fork(n)
        else:
            ends = what < 0.2 or not world.write(n, str(i))
            if ends and len(world.sequences) > 1:
                world.end(n)
    while world.sequences:
        world.end(0)
    assert world.blocks.free_blocks == world.blocks.inner.num_blocks
