"""Exercise 4.1: byte pair encoding of a word.

`ranks` is the list of merges: ranks[left, right] is the rank of the merge of these two neighbours; a pair
that is not in it cannot be merged. Begin with the single bytes of the word. While two neighbours can be
merged, merge the pair with the lowest rank; if it is there several times, the leftmost of them.

Return the pieces. The word has any length, 0 too.
"""

from __future__ import annotations

Ranks = dict[tuple[bytes, bytes], int]


def merge(word: bytes, ranks: Ranks) -> list[bytes]:
    raise NotImplementedError("Your turn")
