"""Exercise 4.1: byte pair encoding of a word.

`ranks` is the list of merges: ranks[left, right] is the rank of the merge of these two neighbours; a pair
that is not in it cannot be merged. Begin with the single bytes of the word. While two neighbours can be
merged, merge the pair with the lowest rank; if it is there several times, the leftmost of them.

Return the pieces. The word has any length, 0 too.
"""

from __future__ import annotations

from itertools import pairwise

Ranks = dict[tuple[bytes, bytes], int]


def merge(word: bytes, ranks: Ranks) -> list[bytes]:
    pieces = [bytes([byte]) for byte in word]
    while True:
        mergeable = [(ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not mergeable:
            return pieces
        _, i = min(mergeable)  # of equal ranks the smaller index: the leftmost
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
