"""Exercise 4.2: an incremental decoder, against Python's own."""

from __future__ import annotations

import codecs
import random

import pytest
from conftest import Exercise
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.tokenizer import Tokenizer


def pieces_of(exercise: Exercise, tokens: list[bytes]) -> list[str]:
    detokenizer = exercise.python("detokenizer.py").Detokenizer()
    return [*map(detokenizer.add, tokens), detokenizer.finish()]


def right_pieces(tokens: list[bytes]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [*map(decoder.decode, tokens), decoder.decode(b"", final=True)]


@pytest.mark.parametrize(
    "tokens",
    [
        [b"a", b"", b"bc"],
        [b"\xc3", b"\xa9", b"t\xc3", b"\xa9"],  # the head of a character behind a whole one
        [b"\xf0", b"\x9f", b"\x8c", b"\xb6"],
        [b"\xf0\x9f", b"\x8c\xb6\xe2\x82", b"\xac!"],  # the tail of one and the head of the next
        [b"ok \xf0\x9f"],  # the end comes too early
        [b"\xc3", b"(", b"\xa9"],  # not what was announced
        [b"\xff", b"\x80", b"a"],  # never a character
        [b"\xe2\x82", b"\xe2\x82\xac"],
        [b"\xe0", b"\x80", b"\x80"],  # E0 must be followed by A0 to BF
        [b"\xf4\x90", b"\x80\x80"],  # above the last character
        [b"\xc0", b"\x80"],
    ],
)
def test_pieces(exercise: Exercise, tokens: list[bytes]) -> None:
    assert pieces_of(exercise, tokens) == right_pieces(tokens)


def test_half_of_a_surrogate_pair_is_no_character(exercise: Exercise) -> None:
    tokens = [b"a\xed\xa0", b"\x80", b"b"]
    assert "".join(pieces_of(exercise, tokens)) == b"".join(tokens).decode("utf-8", errors="replace")


def test_random_bytes_in_random_pieces(exercise: Exercise) -> None:
    choose = random.Random(4)
    alphabet = [
        b"a",
        b"\xc3",
        b"\xa9",
        b"\xe2",
        b"\x82",
        b"\xac",
        b"\xf0",
        b"\x9f",
        b"\xff",
        b"\xf4",
        b"\x90",
    ]
    for _ in range(2000):
        tokens = [b"".join(choose.choices(alphabet, k=choose.randrange(4))) for _ in range(8)]
        assert pieces_of(exercise, tokens) == right_pieces(tokens)


def test_the_small_models_tokens(exercise: Exercise) -> None:
    tokenizer = Tokenizer.from_folder(bundled_model_folder())
    text = "a naïve 🌶🌶, 東京 and €"
    tokens = [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]
    pieces = pieces_of(exercise, tokens)
    assert "".join(pieces) == text
    assert pieces == right_pieces(tokens)
