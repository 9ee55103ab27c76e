"""Exercise 17.1, in Python: the block allocator. (block_allocator.cpp is the same in C++. Write one or both.)

Blocks are the numbers 0 ... num_blocks - 1. Each is free or in one block table, never both, never in two.

allocate() is all or nothing. release() takes back a whole table, or refuses it and changes nothing: when it
has a block that is free, one that does not exist, or one twice.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))[::-1]  # a stack: the last one is given first
        self.is_owned = [False] * num_blocks

    def num_free(self) -> int:
        return len(self.free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks that nobody owned, or None when there are fewer."""
        if count > len(self.free):
            return None
        table = [self.free.pop() for _ in range(count)]
        for block in table:
            self.is_owned[block] = True
        return table

    def release(self, table: Sequence[int]) -> None:
        """Raises ValueError, and changes nothing, when not all of the table's blocks are owned."""
        if len(set(table)) < len(table):
            raise ValueError("a block is in the table twice")
        for block in table:
            if not 0 <= block < len(self.is_owned):
                raise ValueError(f"block {block} of {len(self.is_owned)}")
            if not self.is_owned[block]:
                raise ValueError(f"block {block} is free")
        for block in reversed(table):
            self.is_owned[block] = False
            self.free.append(block)
