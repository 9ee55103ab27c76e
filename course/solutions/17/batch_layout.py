"""Exercise 17.2: from chunks to the arrays that the kernels read.

A chunk is (table, start, count): positions [start, start + count) of a request with this block table. The
rows of a step are the chunks' tokens, one chunk after the other.

For R chunks and T tokens, build

  positions    (T)     of each row, counted from the beginning of its request
  slots        (T)     where the row's key and value go: block · BS + offset
  query_start  (R + 1) the first row of each chunk, and T at the end
  context_len  (R)     tokens that the chunk's last row sees, itself included
  tables       (R, B)  the block tables, B the length of the longest; shorter ones are filled up with 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Layout:
    positions: list[int]
    slots: list[int]
    query_start: list[int]
    context_len: list[int]
    tables: list[list[int]]


def lay_out(chunks: Sequence[tuple[list[int], int, int]], block_size: int) -> Layout:
    width = max(len(table) for table, _, _ in chunks)
    layout = Layout([], [], [0], [], [])
    for table, start, count in chunks:
        for position in range(start, start + count):
            layout.positions.append(position)
            layout.slots.append(table[position // block_size] * block_size + position % block_size)
        layout.query_start.append(len(layout.positions))
        layout.context_len.append(start + count)
        layout.tables.append(table + [0] * (width - len(table)))
    return layout
