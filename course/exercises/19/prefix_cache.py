"""Exercise 19.1: an allocator that remembers what is in its blocks.

A block is free, cached or owned. It has a count of owners: the block tables that it is in. At 0 owners it
becomes cached if its content can be found, and free otherwise.

  allocate   takes free blocks first. When there are none, it takes cached ones: first those that have been
             cached for longest. From then on their old content cannot be found any more.
  share      one owner more for each block, owned or cached.
  release    one owner less for each, and from the last block of the table to the first, so that the tail of
             a text is older than its head.
  register   makes the full blocks of a table findable. Their keys and values have been computed. A content
             that can be found already, in another block, stays where it is.
  find       the longest beginning of `tokens` that is cached or owned, block by block. The last token never
             counts: somebody wants its logits, so it has to be computed.

What a block holds depends on all tokens up to its end, and not only on its own.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixCache:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        raise NotImplementedError("Your turn")

    def counts(self) -> tuple[int, int, int]:
        """Blocks that are free, cached, owned."""
        raise NotImplementedError("Your turn")

    def allocate(self, count: int) -> list[int] | None:
        """All or nothing."""
        raise NotImplementedError("Your turn")

    def share(self, blocks: Sequence[int]) -> None:
        raise NotImplementedError("Your turn")

    def release(self, table: Sequence[int]) -> None:
        raise NotImplementedError("Your turn")

    def register(self, table: Sequence[int], tokens: Sequence[int]) -> None:
        """`table` holds `tokens`, from the first on. May be called again when there are more tokens."""
        raise NotImplementedError("Your turn")

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Changes nothing: who wants the blocks shares them."""
        raise NotImplementedError("Your turn")
