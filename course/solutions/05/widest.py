"""Exercise 5.2: how wide a load may be.

A GPU loads 1, 2, 4, 8 or 16 bytes a thread with one instruction. The address must be a multiple of that
size: any other is an error, which the GPU reports as "misaligned address" and after which the process can use
it no more.
"""

from __future__ import annotations


def widest_load(address: int, row_bytes: int) -> int:
    """The widest load, in bytes, with which each row of a table can be read from its beginning to its end.

    Rows of `row_bytes` bytes lie one behind the other, the first at `address`. Nothing outside of a row is
    read.
    """
    # Row r begins at address + r * row_bytes: a multiple of the size for every r only if both are.
    return next(size for size in (16, 8, 4, 2, 1) if address % size == 0 and row_bytes % size == 0)


def loads_of_a_row(address: int, row_bytes: int) -> int:
    """How many such loads a row takes, all threads together."""
    return row_bytes // widest_load(address, row_bytes)
