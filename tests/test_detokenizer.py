"""The law of the detokenizer: its pieces, joined, are what decoding all ids at once gives."""

from __future__ import annotations

import json
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_level, sentencepiece, spell
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.detokenizer import Detokenizer
from tiny_vllm.errors import InternalError
from tiny_vllm.tokenizer import Tokenizer

TEXTS = ["é你🌶ok", "👩‍👩‍👧 family", "안녕하세요 세계", "naïve café — déjà vu", "مرحبا", "a\u0301🏳️‍🌈", "�é�"]


def stream(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], prompt: list[int] | None = None, skip: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [], skip_special_tokens=skip)
    edges = [0, *sorted(c % (len(ids) + 1) for c in cuts), len(ids)]
    pieces = [detokenizer.add(ids[a:b]) for a, b in pairwise(edges)]
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return pieces


def one_by_one(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    return stream(tokenizer, ids, list(range(len(ids))), prompt)


def test_a_token_that_ends_one_character_and_holds_the_next() -> None:
    """B01: splits inside each multi-byte character of é你🌶ok."""
    chunks = [b"\xc3", b"\xa9\xe4\xbd", b"\xa0\xf0", b"\x9f\x8c\xb6", b"ok"]
    tokenizer = byte_level(chunks)
    ids = [tokenizer.backend.token_to_id(t) for t in map(spell, chunks)]
    assert None not in ids
    pieces = one_by_one(tokenizer, ids)
    assert pieces == ["", "", "é", "你", "🌶", "ok", ""]
    assert [tokenizer.token_bytes(i) for i in ids] == chunks
    assert tokenizer.token_text(ids[1]) == "\ufffd\ufffd"


def test_single_bytes_of_sentencepiece_wait_for_the_end_of_their_row() -> None:
    tokenizer = sentencepiece()
    single = {b: tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in range(256)}
    ids = [single[b] for b in "🌶".encode()] + [tokenizer.backend.token_to_id("▁am")]
    assert one_by_one(tokenizer, ids) == ["", "", "", "", "", "🌶 am", ""]
    assert one_by_one(tokenizer, ids[:4])[-1] == "🌶"
    # A byte that spoils the row spoils all of it, so that nothing of it could have been given out before.
    spoilt = [*ids[:4], single[0xFF], ids[4]]
    assert "".join(one_by_one(tokenizer, spoilt)) == tokenizer.decode(spoilt) == "\ufffd" * 5 + " am"


def test_spaces_of_sentencepiece() -> None:
    """B03: ids of ▁I ▁am ▁here, and a continuation of `I`."""
    tokenizer = sentencepiece()
    i, am, here = (tokenizer.backend.token_to_id(t) for t in ("▁I", "▁am", "▁here"))
    assert one_by_one(tokenizer, [i, am, here]) == ["", "I", " am", " here", ""]
    assert tokenizer.decode([i, am, here]) == "I am here"
    assert one_by_one(tokenizer, [am, here], prompt=[1, i]) == ["", " am", " here", ""]
    # With nothing but special tokens before it, the first word begins the text.
    assert one_by_one(tokenizer, [i, am], prompt=[1])[1:] == ["I", " am", ""]


def test_a_lone_space_piece_does_not_eat_the_next_space() -> None:
    tokenizer = sentencepiece()
    space, i, am = (tokenizer.backend.token_to_id(t) for t in ("▁", "▁I", "▁am"))
    for ids in ([space, am], [i, space, am], [i, space, space, space, am], [space, space, i]):
        assert "".join(one_by_one(tokenizer, ids)) == tokenizer.decode(ids)


def test_unfinished_bytes_show_when_there_is_nothing_more() -> None:
    tokenizer = byte_level()
    euro = list("€".encode())
    assert one_by_one(tokenizer, euro[:2]) == ["", "", "", "\ufffd"]
    detokenizer = Detokenizer(tokenizer)
    detokenizer.add(euro[:2])
    detokenizer.finish()
    assert detokenizer.finish() == ""
    with pytest.raises(InternalError):
        detokenizer.add([97])


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_character_that_the_prompt_left_unfinished(make: object) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    first, *rest = [tokenizer.backend.token_to_id(t) for t in _bytes_of(tokenizer, "🌶")]
    word = tokenizer.encode("a", add_special_tokens=False)
    assert "".join(one_by_one(tokenizer, [*rest, *word], prompt=[*word, first])).startswith("🌶")


def _bytes_of(tokenizer: Tokenizer, text: str) -> list[str]:
    if tokenizer.is_byte_level:
        return list(spell(text.encode()))
    return [f"<0x{b:02X}>" for b in text.encode()]


def test_special_tokens_and_padding_rows_give_no_text() -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        a, b = (tokenizer.backend.token_to_id(t) for t in _bytes_of(tokenizer, "é"))
        eos = tokenizer.eos_token_id
        assert eos is not None
        ids = [a, eos, 99_999, b, eos]
        assert "".join(one_by_one(tokenizer, ids)) == tokenizer.decode(ids) == "é"
        shown = "".join(stream(tokenizer, ids, [1, 2, 3], skip=False))
        assert shown == tokenizer.decode(ids, skip_special_tokens=False)
        assert tokenizer.special_tokens["eos_token"] in shown


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=20)), data=st.data())
def test_any_split_of_a_text_over_byte_level_tokens(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    edges = data.draw(st.lists(st.integers(0, len(raw)), max_size=12).map(sorted))
    bounds = [0, *edges, len(raw)]
    chunks = [raw[a:b] for a, b in pairwise(bounds) if a < b]
    tokenizer = byte_level(chunks)
    ids = [tokenizer.backend.token_to_id(spell(chunk)) for chunk in chunks]
    pieces = stream(tokenizer, ids, data.draw(st.lists(st.integers(0, 30), max_size=8)))
    assert "".join(pieces) == text
    # Nothing is held back longer than needed: what is complete before the last token has been given out.
    last = chunks[-1] if chunks else b""
    detokenizer = Detokenizer(tokenizer)
    given_out = detokenizer.add(ids[:-1])
    assert given_out == raw[: len(raw) - len(last)].decode(errors="ignore")


PARTS = [c.encode()[:n] for c in "éß한🌶" for n in (2, 3)]
BYTE_LEVEL = byte_level([*PARTS, b"\x9f\x8c\xb6 ok", b" the", b"\xff\xe4"])
SENTENCEPIECE = {strip: sentencepiece(strip=strip) for strip in (True, False)}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_of_a_byte_level_tokenizer(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.one_of(st.integers(0x7F, 280), st.integers(0, 300)), max_size=24))
    skip = data.draw(st.booleans())
    pieces = stream(BYTE_LEVEL, ids, data.draw(st.lists(st.integers(0, 30), max_size=10)), skip=skip)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("strip", [True, False])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_of_a_sentencepiece_tokenizer(strip: bool, data: st.DataObject) -> None:
    tokenizer = SENTENCEPIECE[strip]
    count = tokenizer.vocab_size
    euro = st.sampled_from([3 + b for b in "é€🌶".encode()])
    token = st.one_of(euro, st.integers(259, count + 1), st.integers(0, 2), st.integers(0, count))
    prompt = data.draw(st.lists(token, max_size=8))
    ids = data.draw(st.lists(token, max_size=24))
    skip = data.draw(st.booleans())
    pieces = stream(tokenizer, ids, data.draw(st.lists(st.integers(0, 30), max_size=10)), prompt, skip)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    after = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))
    assert "".join(pieces) == after[same:]


@pytest.mark.parametrize("kind", ["words", "bytes", "spaces", "special"])
def test_the_work_per_token_does_not_grow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = sentencepiece()
    bytes_of_a_character = [3 + b for b in "🌶".encode()]
    row = {"words": [260, 261], "bytes": bytes_of_a_character, "spaces": [259], "special": [2]}[kind]
    decoded = 0
    real = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal decoded
        decoded += len(ids)
        return real(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    ids = (row * 2000)[:2000]
    one_by_one(tokenizer, ids, prompt=[1, 260, 261])
    assert decoded <= 10 * len(ids)


def test_the_golden_texts_of_the_bundled_model() -> None:
    tokenizer = Tokenizer.from_folder(bundled_model_folder())
    golden = json.loads((Path(__file__).parent / "data" / "golden_smollm2.json").read_text(encoding="utf-8"))
    for prompt in golden["prompts"]:
        detokenizer = Detokenizer(tokenizer, prompt["prompt_ids"], skip_special_tokens=False)
        pieces = [detokenizer.add([i]) for i in prompt["greedy_ids"]] + [detokenizer.finish()]
        assert "".join(pieces) == prompt["greedy_text"], prompt["name"]
