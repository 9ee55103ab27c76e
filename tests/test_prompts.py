"""Texts that are certainly too long are refused before they are encoded; no text is that could fit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from helpers import greedy, open_engine
from small_tokenizers import byte_level_backend, sentencepiece_backend
from tiny_vllm import InvalidRequestError
from tiny_vllm.prompts import Prompts, length_limit
from tiny_vllm.tokenizer import Tokenizer
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend


def merging_backend() -> Backend:
    """Byte-level, with tokens of up to eight letters."""
    merges = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"), ("a", "b")]
    return byte_level_backend([b"aa", b"aaaa", b"a" * 8, b"ab"], merges=merges)


def nfc_backend() -> Backend:
    backend = merging_backend()
    backend.normalizer = normalizers.NFC()
    return backend


def split_backend(behavior: str) -> Backend:
    backend = merging_backend()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", behavior), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return backend


@pytest.mark.parametrize(
    ("backend", "longest"),
    [
        (merging_backend(), 4 * 8),
        (nfc_backend(), 4 * 8),
        (split_backend("isolated"), 4 * 8),
        (sentencepiece_backend(), 4 * 7),
    ],
)
def test_no_text_has_fewer_tokens_than_its_length_allows(backend: Backend, longest: int) -> None:
    tokenizer = Tokenizer(backend)
    limit = length_limit(tokenizer)
    assert limit is not None
    assert limit.longest == longest
    random_texts = random.Random(0)
    alphabet = [
        "a" * 8,
        "a",
        "ab",
        " ",
        "\u1100\u1161\u11a8",
        "\u03b1\u0313\u0300\u0345",
        "<|bos|>",
        "\0",
        "\U0001f600",
    ]
    for letters in [[letter] for letter in alphabet] + [alphabet] * 20:
        text = "".join(random_texts.choices(letters, k=200))
        assert len(tokenizer.encode(text)) >= limit.fewest_tokens(text)


def with_added(**flags: bool) -> Backend:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("<mask>", **flags)])
    return backend


def with_normalizer(normalizer: Any) -> Backend:
    backend = byte_level_backend()
    backend.normalizer = normalizer
    return backend


def without_the_letter_a() -> Backend:
    vocabulary = byte_level_backend(special=()).get_vocab()
    del vocabulary["a"]
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = byte_level_backend().pre_tokenizer, byte_level_backend().decoder
    return backend


def without_pre_tokenizer() -> Backend:
    backend = byte_level_backend()
    backend.pre_tokenizer = pre_tokenizers.Digits()
    return backend


def test_bytes_without_a_token_do_not_count() -> None:
    """SmolLM2's vocabulary lacks a few control characters, for one."""
    tokenizer = Tokenizer(without_the_letter_a())
    limit = length_limit(tokenizer)
    assert limit is not None
    assert (limit.longest, limit.lost) == (4 * 2, b"a")
    for text in ("a" * 1000, "ab" * 500, "b" * 1000):
        assert len(tokenizer.encode(text)) == text.count("b")
        assert limit.fewest_tokens(text) == text.count("b") // limit.longest


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (with_added(lstrip=True), " " * 1000 + "<mask>"),
        (with_added(rstrip=True), "<mask>" + " " * 1000),
        (with_normalizer(normalizers.Strip()), " " * 1000),
        (with_normalizer(normalizers.Replace("ab", "")), "ab" * 500),
        (with_normalizer(normalizers.Replace("a", "")), "a" * 1000),
        (
            with_normalizer(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
            "\u0301" * 1000,
        ),
        (split_backend("removed"), " " * 1000),
        (without_pre_tokenizer(), "\u0301" * 1000),
    ],
)
def test_there_is_no_limit_where_text_can_vanish(backend: Backend, text: str) -> None:
    """Each of these texts of a thousand characters or so is one token or none."""
    tokenizer = Tokenizer(backend)
    assert len(tokenizer.encode(text)) <= 1
    assert length_limit(tokenizer) is None


def test_a_text_without_end_is_refused_at_once(rand_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(rand_folder)
    assert engine.tokenizer is not None

    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("encoded")

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    with pytest.raises(
        InvalidRequestError, match=r"prompt has 24000000 characters, .* there is room for 1024"
    ):
        engine.generate("hello world " * 2_000_000, greedy(1))


def test_content_in_parts_is_joined(bundled_folder: Path) -> None:
    prompts = Prompts(Tokenizer.from_folder(bundled_folder), bundled_folder, 2048, 2048)
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "gravity?"}]
    whole = prompts.read_chat([{"role": "user", "content": "What is\ngravity?"}], True)
    assert prompts.read_chat([{"role": "user", "content": parts}], True) == whole
    for bad in ([{"type": "image_url", "image_url": "x"}], ["text"], [{"type": "text"}]):
        with pytest.raises(
            InvalidRequestError, match="content of a message must be text, or a list of parts"
        ):
            prompts.read_chat([{"role": "user", "content": bad}], True)
