"""Exercise 12.3: which buffers may share memory?

place(ops, sizes) -> where each buffer begins, in bytes from the start of one allocation

ops: what runs, in order: for each op the buffers that it reads and those that it writes.
sizes: bytes of each buffer.

A buffer is alive from the first op that names it up to the last one that does, both included: an op still
reads its inputs while it writes its outputs. Buffers that are alive in the same op must not overlap. The end
of the last buffer is the memory that is needed; the tests say how little is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Op = tuple[Sequence[str], Sequence[str]]  # (reads, writes)


def place(ops: Sequence[Op], sizes: Mapping[str, int]) -> dict[str, int]:
    alive: dict[str, tuple[int, int]] = {}
    for i, (reads, writes) in enumerate(ops):
        for name in (*reads, *writes):
            first, _ = alive.get(name, (i, i))
            alive[name] = (first, i)

    def meet(a: str, b: str) -> bool:
        return alive[a][0] <= alive[b][1] and alive[b][0] <= alive[a][1]

    begins: dict[str, int] = {}
    for name in sorted(alive, key=lambda n: -sizes[n]):  # the large ones first: the small ones find gaps
        taken = sorted((begins[b], begins[b] + sizes[b]) for b in begins if meet(name, b))
        begin = 0
        for other_begin, other_end in taken:
            if begin + sizes[name] <= other_begin:
                break
            begin = max(begin, other_end)
        begins[name] = begin
    return begins
