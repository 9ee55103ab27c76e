"""Exercise 4.1: merges, on small lists and on those of the small model."""

from __future__ import annotations

import pytest
from conftest import Exercise
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.course.chapter_04 import PROGRAM, TEXTS, read_merges, split
from tiny_vllm.tokenizer import Tokenizer

RANKS = {
    (b"b", b"c"): 0,
    (b"a", b"b"): 1,
    (b"a", b"bc"): 2,
    (b"c", b"d"): 3,
    (b"x", b"x"): 4,
    (b"xx", b"x"): 5,
}


@pytest.mark.parametrize(
    ("word", "pieces"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"ad", [b"a", b"d"]),
        (b"ab", [b"ab"]),
        (b"abc", [b"abc"]),  # b|c comes first, although a|b is further to the left
        (b"abcd", [b"abc", b"d"]),  # c|d comes too late
        (b"abab", [b"ab", b"ab"]),
        (b"xxx", [b"xxx"]),
        (b"xxxx", [b"xx", b"xx"]),
        (b"xxxxx", [b"xx", b"xxx"]),
        (b"xxaxx", [b"xx", b"a", b"xx"]),
    ],
)
def test_the_lowest_rank_comes_first(exercise: Exercise, word: bytes, pieces: list[bytes]) -> None:
    assert exercise.python("merge.py").merge(word, RANKS) == pieces


def test_one_merge_at_a_time(exercise: Exercise) -> None:
    ranks = {
        (b"ab", b"a"): 0,
        (b"a", b"b"): 1,
    }  # the first a|b makes a pair with a lower rank than the second
    assert exercise.python("merge.py").merge(b"abab", ranks) == [b"aba", b"b"]


def test_words_are_cut_as_the_tokenizer_cuts_them(exercise: Exercise) -> None:
    folder = bundled_model_folder()
    tokenizer = Tokenizer.from_folder(folder)
    ranks = read_merges(folder / "tokenizer.json")
    merge = exercise.python("merge.py").merge
    for text in [*TEXTS.values(), PROGRAM, "unbelievably indivisible Grundstücksverkehr 🌶🌶 東京"]:
        ours = [piece for word in split(tokenizer, text) for piece in merge(word, ranks)]
        assert ours == [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]
