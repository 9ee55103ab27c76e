"""Exercise 20.2: which steps are recorded.

A step of decodes has a number of rows and a width, the length of its longest block table. It is padded to one
of a few shapes. The first step of a shape runs as it is, the second is recorded, and later ones are replayed.
"""

from __future__ import annotations

from collections.abc import Sequence


class Recorder:
    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: the numbers of rows that are recorded, in rising order."""
        self._sizes = list(sizes)
        self._seen: set[tuple[int, int]] = set()
        self._recorded: set[tuple[int, int]] = set()
        self._moves = 0

    def shape(self, rows: int, width: int) -> tuple[int, int] | None:
        """The shape that a step is padded to; None if it has more rows than the largest size.

        Rows become the smallest size that has room for them, the width a power of two, at least 8.
        """
        padded_rows = next((size for size in self._sizes if rows <= size), None)
        if padded_rows is None:
            return None
        padded_width = 8
        while padded_width < width:
            padded_width *= 2
        return padded_rows, padded_width

    def step(self, rows: int, width: int, moves: int) -> str:
        """How this step runs: "as it is", "recorded" (and then replayed), or "replayed".

        moves: how often memory that kernels use has moved up to now, the moves before this step included. A
        recording holds addresses, so one that was made before a move is worth nothing.
        """
        shape = self.shape(rows, width)
        if shape is None:
            return "as it is"
        if moves != self._moves:
            self._recorded.clear()  # of all shapes: each holds the old addresses
        self._moves = moves
        if shape not in self._seen:
            self._seen.add(shape)
            return "as it is"
        if shape not in self._recorded:
            self._recorded.add(shape)
            return "recorded"
        return "replayed"
