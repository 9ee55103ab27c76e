"""Exercise 19.2: copy-on-write.

Sequences that were forked share their blocks. Before a sequence writes the key and value of its token at
`position`, this function makes the place writable:

  - The position may be the first of a new block: then the table needs one more block.
  - The block of the position may have several owners: then this sequence gets one of its own, with a copy of
    what is in it, and is an owner of the old one no longer. The others keep the old one.
  - Otherwise there is nothing to do.

`blocks` is the engine's allocator without its own copy-on-write: free_blocks, allocate(count) -> list or
None, release(table), ref_count(block). `copy(source, target)` copies a block's content, at once.

False, and nothing has changed, when a block is needed and none is free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def make_writable(
    blocks: Any, table: list[int], position: int, block_size: int, copy: Callable[[int, int], None]
) -> bool:
    raise NotImplementedError("Your turn")
