"""Exercise 11.2: which tiles of keys does a block visit, and in which must it mask?

A block has the query rows `first_row` to `last_row` (both included) of a request. As in the engine, row i is
a query head of token i // group, and token 0 stands at position `first_position` of the request. A token at
position p sees the keys max(0, p - window + 1) to p.

Keys come in tiles of `keys`: 0 to keys - 1, and so on. Return a list of (tile, masked), in order: each tile
in which some row sees some key, and whether there is a row in the block that does not see all of the tile.
"""

from __future__ import annotations


def tiles(
    first_row: int, last_row: int, *, group: int, first_position: int, window: int, keys: int
) -> list[tuple[int, bool]]:
    first = first_position + first_row // group  # position of the first row, and of the last
    last = first_position + last_row // group
    oldest = max(0, first - window + 1)  # the first row looks back furthest, the last one ahead
    found = []
    for tile in range(oldest // keys, last // keys + 1):
        begin, end = tile * keys, (tile + 1) * keys
        all_see_it = end - 1 <= first and begin > last - window
        found.append((tile, not all_see_it))
    return found
