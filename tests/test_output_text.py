"""The law of OutputText: however the text is cut into tokens, it ends where str.find says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_level, sentencepiece, spell
from tiny_vllm.detokenizer import Detokenizer
from tiny_vllm.output_text import OutputText


def ended(text: str, stops: Iterable[str], include: bool = False) -> tuple[str, str | None]:
    """The definition: the stop string that ends first, the longest of those, cuts the text."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


def run(
    chunks: Sequence[bytes], stops: Sequence[str], include: bool = False, min_tokens: int = 0
) -> tuple[list[str], str | None]:
    """What may be shown after each token and at the end, and the stop string."""
    tokenizer = byte_level([c for c in dict.fromkeys(chunks) if len(c) > 1])
    text = OutputText(Detokenizer(tokenizer), stops, include)
    shown = []
    for i, chunk in enumerate(chunks):
        token = tokenizer.backend.token_to_id(spell(chunk))
        assert token is not None
        text.add([token], look_for_stop=i >= min_tokens)
        shown.append(text.text)
        if text.stop is not None:
            return shown, text.stop
    text.finish(look_for_stop=len(chunks) > min_tokens)
    return [*shown, text.text], text.stop


def pieces(words: str) -> list[bytes]:
    return [word.encode() for word in words.split("|")]


@pytest.mark.parametrize(
    ("said", "stops", "shown", "stop"),
    [
        ("al|pha be|ta", ["a bet"], ["al", "alph", "alph"], "a bet"),  # begins and ends within tokens
        ("al|pha be|ta ga", ["ga", "a b"], ["al", "alph"], "a b"),  # the earlier place, not the earlier entry
        ("al|pha|be", ["pha"], ["al", "al"], "pha"),  # one whole token
        ("al|pha|be", ["l", "a"], [""], "a"),
        ("abcd", ["bc", "abcd"], ["a"], "bc"),  # one within another: the one that ends first,
        ("ab|cd", ["bc", "abcd"], ["", "a"], "bc"),  # as when the tokens are shorter
        ("ab|c", ["c", "bc", "abcd"], ["", "a"], "bc"),  # they end together: the longest
        ("aa|aa|b", ["aaab"], ["", "a", "a"], "aaab"),  # the first try was one too early
        ("ab|ab|ac", ["abac"], ["", "ab", "ab"], "abac"),
        ("ab|x|ab", ["abc"], ["", "abx", "abx", "abxab"], None),  # at the end nothing waits any more
        ("x|\nUs|er:", ["\nUser:", "###"], ["x", "x", "x"], "\nUser:"),
        ("né|e", ["ée"], ["n", "n"], "ée"),
    ],
)
def test_where_the_text_ends(said: str, stops: list[str], shown: list[str], stop: str | None) -> None:
    """After each token the text that can no longer become part of a stop string is there, all of it."""
    assert run(pieces(said), stops) == (shown, stop)


def test_half_characters() -> None:
    """One that is still waiting at the end shows as U+FFFD, and that may be a stop string as well."""
    assert run([b"a\xc3", b"\xa9b"], ["é"]) == (["a", "a"], "é")
    assert run([b"a\xc3"], ["é"]) == (["a", "a\ufffd"], None)
    assert run([b"a\xc3"], ["\ufffd"]) == (["a", "a"], "\ufffd")


def test_bytes_of_sentencepiece_wait_and_may_end_the_text() -> None:
    tokenizer = sentencepiece()
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "aé".encode()]
    assert None not in ids
    text = OutputText(Detokenizer(tokenizer), ["é"])
    text.add(ids)
    assert (text.text, text.stop) == ("", None)
    text.finish()
    assert (text.text, text.stop) == ("a", "é")


def test_the_stop_string_can_be_included() -> None:
    """The text ends after it, also within a token, and nothing waits."""
    assert run(pieces("al|pha be|ta"), ["a bet"], include=True) == (["al", "alpha be", "alpha bet"], "a bet")
    assert run(pieces("al|pha be|ta"), ["pha"], include=True) == (["al", "alpha"], "pha")
    assert run(pieces("al|pha"), ["phax"], include=True) == (["al", "alpha", "alpha"], None)


def test_the_first_tokens_can_be_exempt() -> None:
    """A stop string that ends in them does not count, one that begins in them does."""
    assert run(pieces("ab|ab|ab|ab"), ["ab"], min_tokens=2) == (["ab", "abab", "abab"], "ab")
    assert run(pieces("a|b|c"), ["bc"], min_tokens=2) == (["a", "a", "a"], "bc")
    assert run(pieces("a|b|c"), ["ab"], min_tokens=2) == (["", "ab", "abc", "abc"], None)
    assert run(pieces("a|b"), ["ab"], min_tokens=2) == (["", "ab", "ab"], None)


texts = st.text(alphabet="abé ", max_size=24)
stop_lists = st.lists(st.text(alphabet="abé ", min_size=1, max_size=5), max_size=4)


@given(text=texts, stops=stop_lists, include=st.booleans(), data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_text_any_stops_any_tokens(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    raw = text.encode()
    cuts = data.draw(st.sets(st.integers(1, max(1, len(raw) - 1))))
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    chunks = [raw[a:b] for a, b in pairwise(edges)]
    shown, stop = run(chunks, stops, include)
    assert (shown[-1], stop) == ended(text, stops, include)
    final = shown[-1]
    for i, early in enumerate(shown[:-1]):
        assert final.startswith(early)  # nothing is taken back
        known = b"".join(chunks[: i + 1]).decode(errors="ignore")
        if stop is None or i < len(shown) - 2:
            # And nothing waits without reason: some stop string begins with what does.
            waiting = known[len(early) :]
            assert not waiting or any(s.startswith(waiting) for s in stops)


@given(text=st.text(alphabet="ab", max_size=12), stop=st.text(alphabet="ab", min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_min_tokens_by_definition(text: str, stop: str) -> None:
    """With one letter a token, the stop string that counts is the first that ends after them."""
    chunks = [letter.encode() for letter in text]
    for min_tokens in (0, 1, 3, 20):
        ends = [n for n in range(min_tokens + 1, len(text) + 1) if text[:n].endswith(stop)]
        shown, found = run(chunks, [stop], min_tokens=min_tokens)
        assert shown[-1] == (text[: ends[0] - len(stop)] if ends else text)
        assert (found is not None) == bool(ends)
