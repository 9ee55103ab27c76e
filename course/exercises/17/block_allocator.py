"""Exercise 17.1, in Python: the block allocator. (block_allocator.cpp is the same in C++. Write one or both.)

Blocks are the numbers 0 ... num_blocks - 1. Each is free or in one block table, never both, never in two.

allocate() is all or nothing. release() takes back a whole table, or refuses it and changes nothing: when it
has a block that is free, one that does not exist, or one twice.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        raise NotImplementedError("Your turn")

    def num_free(self) -> int:
        raise NotImplementedError("Your turn")

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks that nobody owned, or None when there are fewer."""
        raise NotImplementedError("Your turn")

    def release(self, table: Sequence[int]) -> None:
        """Raises ValueError, and changes nothing, when not all of the table's blocks are owned."""
        raise NotImplementedError("Your turn")
