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
        self.block_size = block_size
        self.owners = [0] * num_blocks
        self.free = list(range(num_blocks))
        self.cached: dict[int, None] = {}  # as a list in order from which any entry can be taken
        self.block_of: dict[tuple[int, ...], int] = {}  # all tokens up to the end of a block -> the block
        self.content_of: dict[int, tuple[int, ...]] = {}  # and back

    def counts(self) -> tuple[int, int, int]:
        """Blocks that are free, cached, owned."""
        owned = sum(owners > 0 for owners in self.owners)
        return len(self.free), len(self.cached), owned

    def allocate(self, count: int) -> list[int] | None:
        """All or nothing."""
        if count > len(self.free) + len(self.cached):
            return None
        table = []
        for _ in range(count):
            if self.free:
                block = self.free.pop()
            else:
                block = next(iter(self.cached))  # dicts keep their order: the one that was cached first
                del self.cached[block]
                del self.block_of[self.content_of.pop(block)]
            self.owners[block] = 1
            table.append(block)
        return table

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.cached.pop(block, None)
            self.owners[block] += 1

    def release(self, table: Sequence[int]) -> None:
        for block in reversed(table):
            self.owners[block] -= 1
            if self.owners[block] > 0:
                continue
            if block in self.content_of:
                self.cached[block] = None
            else:
                self.free.append(block)

    def register(self, table: Sequence[int], tokens: Sequence[int]) -> None:
        """`table` holds `tokens`, from the first on. May be called again when there are more tokens."""
        for i in range(len(tokens) // self.block_size):
            content = tuple(tokens[: (i + 1) * self.block_size])
            if content not in self.block_of:
                self.block_of[content] = table[i]
                self.content_of[table[i]] = content

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Changes nothing: who wants the blocks shares them."""
        found = []
        for i in range((len(tokens) - 1) // self.block_size):
            block = self.block_of.get(tuple(tokens[: (i + 1) * self.block_size]))
            if block is None:
                break
            found.append(block)
        return found
