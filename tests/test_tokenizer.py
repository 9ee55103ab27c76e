"""Text to ids: the same as Hugging Face's and the models' own libraries, and no broken file taken for a good
one.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import random
import shutil
import string
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import require_package
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import (
    BYTES,
    byte_level,
    byte_level_backend,
    sentencepiece,
    sentencepiece_backend,
    write_folder,
)
from tiny_vllm import plain_files
from tiny_vllm.bpe import byte_alphabet, merges_from_ranks, sentencepiece_bpe
from tiny_vllm.bundled import bundled_model_folder
from tiny_vllm.errors import InvalidRequestError, ModelLoadError
from tiny_vllm.tokenizer import Tokenizer, load_generation_config
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

LETTERS = "abc ABC 0123 \t\n\r é ß 한국 漢字 🍕 👩‍👩‍👧 .,;:!?-_/()[]{}<>| don't \u00a0\u3000"


def varied_texts(count: int, seed: int = 0) -> list[str]:
    """Prose, code, odd mixtures and random letters of all scripts; the same ones each time."""
    from pydoc_data.topics import topics

    source = "\n".join(topics.values())
    rng = random.Random(seed)
    texts = []
    for i in range(count):
        if i % 3 == 0:
            start = rng.randrange(len(source) - 300)
            texts.append(source[start : start + rng.randrange(1, 300)])
        elif i % 3 == 1:
            texts.append("".join(rng.choice(LETTERS) for _ in range(rng.randrange(1, 60))))
        else:
            ranges = [(32, 0x3000), (0x3000, 0xD800), (0xE000, 0x20000)]
            texts.append(
                "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 40)))
            )
    return texts


def bpe_json(vocab: list[str], merges: Any, ignore_merges: bool = False, **changes: Any) -> dict[str, Any]:
    """A tokenizer.json without a pre-tokenizer: the text is one word."""
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(vocab)}, "merges": merges}
    model.update({"ignore_merges": ignore_merges, "byte_fallback": False, "fuse_unk": False})
    added = changes.pop("added_tokens", [])
    return {"version": "1.0", "added_tokens": added, "decoder": {"type": "Fuse"}, "model": model, **changes}


def refused(folder: Path, content: dict[str, Any] | str, match: str) -> None:
    folder.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelLoadError, match=match) as caught:
        Tokenizer.from_folder(folder)
    assert "tokenizer.json" in str(caught.value)


# ---- B06: merges -------------------------------------------------------------------------------------------

VOCAB = [*"abcdefgh ", "ab", "cd", "abcd", "d e", "ef", "gh", "efgh", "headed"]
PAIRS = [["a", "b"], ["c", "d"], ["ab", "cd"], ["e", "f"], ["g", "h"], ["ef", "gh"]]


def test_merges_in_both_shapes(tmp_path: Path) -> None:
    plain = [t for t in VOCAB if t != "d e"]
    as_pairs = Tokenizer.from_folder(write_folder(tmp_path / "pairs", bpe_json(plain, PAIRS)))
    as_text = Tokenizer.from_folder(
        write_folder(tmp_path / "text", bpe_json(plain, [" ".join(p) for p in PAIRS]))
    )
    reference = Backend.from_file(str(tmp_path / "pairs" / "tokenizer.json"))
    rng = random.Random(0)
    for _ in range(1000):
        text = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(24)))
        ids = as_pairs.encode(text)
        assert ids == as_text.encode(text) == reference.encode(text).ids
        assert as_pairs.decode(ids) == text
    assert as_pairs.encode("abcdefgh") == [plain.index("abcd"), plain.index("efgh")]


def test_a_token_with_a_space_can_only_be_a_pair(tmp_path: Path) -> None:
    pairs = [["d", " "], ["d ", "e"]]
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path / "a", bpe_json([*VOCAB, "d "], pairs)))
    assert tokenizer.encode("d e") == [VOCAB.index("d e")]
    refused(tmp_path / "b", bpe_json([*VOCAB, "d "], ["d  ", "d  e"]), "cannot be loaded")


def test_ignore_merges_takes_a_word_whole(tmp_path: Path) -> None:
    whole = Tokenizer.from_folder(
        write_folder(tmp_path / "whole", bpe_json(VOCAB, PAIRS, ignore_merges=True))
    )
    split = Tokenizer.from_folder(write_folder(tmp_path / "split", bpe_json(VOCAB, PAIRS)))
    assert whole.encode("headed") == [VOCAB.index("headed")]
    assert split.encode("headed") == [VOCAB.index(c) for c in "headed"]


def test_a_word_right_after_an_added_token(tmp_path: Path) -> None:
    added = [{"id": len(VOCAB), "content": "<|x|>", "special": False, "normalized": False}]
    added[0].update(single_word=False, lstrip=False, rstrip=False)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, bpe_json(VOCAB, PAIRS, added_tokens=added)))
    assert tokenizer.encode("<|x|>abcd") == [len(VOCAB), VOCAB.index("abcd")]
    assert tokenizer.special_ids == frozenset()
    assert tokenizer.decode([len(VOCAB), 0]) == "<|x|>a"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (bpe_json(VOCAB, []), "without merges"),
        (bpe_json(VOCAB, None), "without merges"),
        (bpe_json(VOCAB, ["a b", "x y"]), "cannot be loaded"),
        (bpe_json(VOCAB, [["a", "b", "c"]]), "cannot be loaded"),
        (bpe_json(VOCAB, ["ab"]), "cannot be loaded"),
        ({"version": "1.0", "added_tokens": []}, "no model"),
        ({"model": {"type": "BPE", "merges": []}}, "no model"),
        ("[1, 2]", "expected a JSON object"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("version https://git-lfs.github.com/spec/v1", "cannot be read as JSON"),
    ],
)
def test_broken_tokenizer_json_is_refused(content: dict[str, Any] | str, match: str, tmp_path: Path) -> None:
    refused(tmp_path, content, match)


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "nobody", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {},
            }
        },
    ],
    ids=["charsmap", "special_token"],
)
def test_what_panics_in_the_library_is_refused(part: dict[str, Any], tmp_path: Path) -> None:
    """The library raises a BaseException, which `except Exception` lets through."""
    refused(tmp_path, {**bpe_json(VOCAB, PAIRS), **part}, "the tokenizer cannot be loaded: ")


def test_a_panic_while_encoding_is_an_error_of_the_prompt() -> None:
    class Panic(BaseException):
        pass

    class Broken:
        def encode(self, text: str, add_special_tokens: bool) -> Any:
            raise Panic("no entry found for key")

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            raise KeyboardInterrupt

    tokenizer = byte_level()
    tokenizer.backend = Broken()  # type: ignore[assignment]
    with pytest.raises(InvalidRequestError, match=r"^prompt: .* cannot encode it: no entry found"):
        tokenizer.encode("a")
    with pytest.raises(KeyboardInterrupt):
        tokenizer.decode([1])


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"]], ids=str)
def test_ids_that_cannot_be_decoded_are_refused(ids: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^ids: "):
        byte_level().decode(ids)


def test_files_that_would_fill_memory_are_not_read(tmp_path: Path) -> None:
    write_folder(tmp_path, bpe_json(VOCAB, PAIRS))
    for name, most in {
        "tokenizer.json": plain_files.MAX_VOCABULARY_BYTES,
        "tokenizer_config.json": plain_files.MAX_JSON_BYTES,
        "chat_template.jinja": plain_files.MAX_TEMPLATE_BYTES,
    }.items():
        with open(tmp_path / name, "wb") as file:
            file.truncate(most + 1)  # a hole: it takes no room on the disk
        with pytest.raises(ModelLoadError, match=rf"{name}: has {most + 1} bytes; at most {most} are read"):
            Tokenizer.from_folder(tmp_path)
        write_folder(tmp_path, bpe_json(VOCAB, PAIRS))
        for other in ("tokenizer_config.json", "chat_template.jinja"):
            (tmp_path / other).unlink(missing_ok=True)


def test_bytes_alone_need_no_merges(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path / "bytes", byte_level_backend()))
    text = "héllo 🌶\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    fallback = Tokenizer.from_folder(write_folder(tmp_path / "fallback", sentencepiece_backend(["▁", "a"])))
    assert fallback.decode(fallback.encode("a a")) == "a a"
    refused(tmp_path, json.loads(byte_level_backend([b"ab"]).to_str()), "without merges")


# ---- the other files ---------------------------------------------------------------------------------------


def test_special_tokens_as_text_and_as_objects(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<|bos|>", "lstrip": False}, "eos_token": "<|eos|>", "pad_token": None}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level_backend(), config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, None)
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.encode("a<|eos|>") == [97, 257]
    assert tokenizer.decode([97, 257, 98]) == "ab"
    assert tokenizer.decode([97, 257, 98], skip_special_tokens=False) == "a<|eos|>b"


def test_special_tokens_of_an_older_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level_backend())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|eos|>"}}))
    assert Tokenizer.from_folder(tmp_path).eos_token_id == 257
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|bos|>"}))
    assert Tokenizer.from_folder(tmp_path).eos_token_id == 256


def test_tokens_that_only_the_config_declares(tmp_path: Path) -> None:
    declared = {
        "258": {"content": "<|late|>", "special": True},
        "257": {"content": "<|eos|>", "special": True},
    }
    folder = write_folder(tmp_path, byte_level_backend(), {"added_tokens_decoder": declared})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<|late|>") == [258]
    assert 258 in tokenizer.special_ids
    assert tokenizer.vocab_size == 259
    for wrong in ({"300": {"content": "<|late|>"}}, {"x": {"content": "y"}}, {"258": {}}, [1]):
        write_folder(tmp_path, byte_level_backend(), {"added_tokens_decoder": wrong})
        with pytest.raises(ModelLoadError, match="added"):
            Tokenizer.from_folder(folder)


def test_saved_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=8, pad_id=256, pad_token="<|bos|>")
    assert len(Tokenizer.from_folder(write_folder(tmp_path, backend)).encode("abcdef")) == 6


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "value", [3, ["x"], [{"name": "default"}], "{% if %}", [{"name": "a", "template": "{{"}]]
)
def test_a_malformed_chat_template_is_refused(value: object, tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level_backend(), {"chat_template": value})
    with pytest.raises(ModelLoadError, match="template"):
        Tokenizer.from_folder(tmp_path)


def test_where_chat_templates_come_from(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level_backend(), {"chat_template": "config"})
    messages = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(messages) == "config"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    write_folder(tmp_path, byte_level_backend(), {"chat_template": named})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(messages) == "one"
    assert tokenizer.apply_chat_template(messages, tools=[{"type": "function"}]) == "two"
    assert tokenizer.apply_chat_template(messages, chat_template="tool_use") == "two"
    assert tokenizer.apply_chat_template(messages, chat_template="{{ messages[0].content }}") == "x"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.apply_chat_template(messages) == "file"
    assert tokenizer.apply_chat_template(messages, chat_template="rag") == "rag"
    with pytest.raises(InvalidRequestError, match="no chat template named 'default'"):
        byte_level().apply_chat_template(messages)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", 3, None, b"bytes", ["a"]])
def test_what_is_not_text_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        byte_level().encode(text)


def test_a_folder_with_an_unusual_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B57: letters of other languages and a space; relative and through a link."""
    folder = write_folder(tmp_path / "модель é 模型", byte_level_backend())
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for path in (folder, "модель é 模型", "link", Path("./link")):
        assert Tokenizer.from_folder(path).encode("a") == [97]


# ---- B04: the begin token ----------------------------------------------------------------------------------

WRITES_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
SPELLS_BOS = "<|bos|>{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "adds_bos", "chat", "plain"),
    [
        (WRITES_BOS, True, [256, 104, 105], [256, 104, 105]),
        (WITHOUT_BOS, True, [91, 104, 105, 93], [256, 104, 105]),
        (SPELLS_BOS, False, [256, 104, 105], [104, 105]),
    ],
)
def test_the_begin_token(
    template: str, adds_bos: bool, chat: list[int], plain: list[int], tmp_path: Path
) -> None:
    backend = byte_level_backend()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 256)]
        )
    config = {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "add_bos_token": adds_bos,
        "chat_template": template,
    }
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend, config))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.encode_chat(messages) == chat
    assert tokenizer.encode("hi") == plain
    assert tokenizer.encode("hi", add_special_tokens=False) == [104, 105]

    require_package("transformers")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(messages, tokenize=True, return_dict=False) == chat
    assert theirs.encode("hi") == plain


# ---- bytes of tokens ---------------------------------------------------------------------------------------


def test_the_alphabet_of_bytes() -> None:
    assert byte_alphabet() == BYTES
    assert len(set(BYTES)) == 256


def test_bytes_of_all_tokens_of_the_bundled_model() -> None:
    tokenizer = Tokenizer.from_folder(bundled_model_folder())
    for i in range(tokenizer.vocab_size):
        assert tokenizer.token_text(i) == tokenizer.decode([i], skip_special_tokens=False)
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_bytes_of_tokens_join_to_the_text(text: str) -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        raw = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
        expected = (" " if text and not tokenizer.is_byte_level else "") + text.replace("▁", " ")
        assert raw.decode() == (text if tokenizer.is_byte_level else expected)


def test_an_added_token_with_letters_outside_the_alphabet() -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("<한 국>", special=False)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes(258).decode() == tokenizer.decode([258]) == "<한 국>"


# ---- tokenizer.model: Llama 3 ------------------------------------------------------------------------------

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def small_ranks(merges: int) -> dict[bytes, int]:
    """A byte-level vocabulary in the order of tiktoken, from the commonest neighbours of a text."""
    ranks = {bytes([b]): b for b in range(256)}
    words = [
        [bytes([b]) for b in (" " + word).encode()] for text in varied_texts(60) for word in text.split()
    ]
    for _ in range(merges):
        counts: dict[bytes, int] = {}
        for word in words:
            for a, b in pairwise(word):
                counts[a + b] = counts.get(a + b, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], pair))
        ranks[best] = len(ranks)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if word[i] + word[i + 1] == best:
                    word[i : i + 2] = [best]
                i += 1
    return ranks


def write_tiktoken(path: Path, ranks: dict[bytes, int]) -> None:
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items()]
    path.write_bytes(b"\n".join(lines) + b"\n")


def test_a_small_tiktoken_vocabulary(tmp_path: Path) -> None:
    require_package("tiktoken")
    import tiktoken

    ranks = small_ranks(150)
    write_tiktoken(tmp_path / "tokenizer.model", ranks)
    ours = Tokenizer.from_folder(tmp_path)
    special = {"<|begin_of_text|>": 406, "<|end_of_text|>": 407, "<|eot_id|>": 415}
    theirs = tiktoken.Encoding("small", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (406, 407, 406 + 256)
    for text in varied_texts(600, seed=1):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, disallowed_special=())
    assert ours.encode("a<|eot_id|>b") == [406, *theirs.encode("a<|eot_id|>b", allowed_special="all")]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda lines: lines[:200], "the byte .* is not among the tokens"),
        (lambda lines: [*lines[:5], lines[4], *lines[5:]], "line 6"),
        (lambda lines: [*lines, b"!!! 256"], "line 257"),
        (lambda lines: [*lines, b"YWI= 300"], "line 257"),
        (lambda lines: [*lines, b"YWI="], "line 257"),
        (lambda lines: [b"version https://git-lfs.github.com/spec/v1"], "Git LFS"),
        (lambda lines: [b"<!DOCTYPE html>"], "neither"),
        (lambda lines: [b""], "neither"),
    ],
)
def test_a_broken_tokenizer_model_is_refused(change: Any, match: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    write_tiktoken(path, {bytes([b]): b for b in range(256)})
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())))
    with pytest.raises(ModelLoadError, match=match) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "tokenizer.model" in str(caught.value)


@pytest.mark.slow
def test_the_vocabulary_of_llama_3(tmp_path: Path) -> None:
    """The file in Meta's package, read by us and by the class that comes with it."""
    require_package("tiktoken")
    require_package("llama_models")
    from llama_models.llama3.tokenizer import Tokenizer as Reference

    spec = importlib.util.find_spec("llama_models")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / "llama3" / "tokenizer.model"
    shutil.copy(source, tmp_path)
    ours, theirs = Tokenizer.from_folder(tmp_path), Reference(source)
    assert ours.vocab_size == theirs.n_words == 128256
    special = list(theirs.special_tokens)
    assert [ours.backend.token_to_id(text) for text in special] == list(theirs.special_tokens.values())
    assert ours.special_ids == set(theirs.special_tokens.values())
    rng = random.Random(5)
    for text in varied_texts(2000, seed=2):
        mixed = text + rng.choice(special) + text[: rng.randrange(20)]
        assert ours.encode(mixed) == theirs.encode(mixed, bos=True, eos=False, allowed_special="all")


# ---- tokenizer.model: SentencePiece ------------------------------------------------------------------------


def train_sentencepiece(folder: Path, **changes: Any) -> Any:
    require_package("sentencepiece")
    import sentencepiece as spm

    texts = [
        text for i, text in enumerate(varied_texts(600, seed=3)) if i % 3 < 2
    ]  # the random letters are too many
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    options = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": True,
        "split_digits": True,
        "character_coverage": 0.98,
        **changes,
    }
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=700,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_model(prefix: bool, tmp_path: Path) -> None:
    theirs = train_sentencepiece(tmp_path, add_dummy_prefix=prefix)
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    for text in varied_texts(600, seed=4):
        clean = text.replace("\u0000", "")
        ids = theirs.encode(clean)
        assert ours.encode(clean) == [1, *ids]
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"model_type": "unigram"}, "unigram"), ({"normalization_rule_name": "nmt_nfkc"}, "text normaliser")],
)
def test_a_sentencepiece_model_of_another_kind_is_refused(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    train_sentencepiece(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=match):
        Tokenizer.from_folder(tmp_path)


def test_pieces_with_equal_scores_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="'ab' and 'bc' have the same score"):
        sentencepiece_bpe(["a", "b", "c", "ab", "bc"], [0.0, 0.0, 0.0, -1.0, -1.0], [1] * 5)


@pytest.mark.parametrize("score", [float("nan"), "a", True, None], ids=str)
def test_a_score_that_is_not_a_number_is_refused(score: Any) -> None:
    with pytest.raises(ModelLoadError, match="the score of 'b' is"):
        sentencepiece_bpe(["a", "b"], [0.0, score], [1] * 2)


def test_only_cuts_into_known_lengths_are_tried() -> None:
    """All cuts of one piece of a million letters would be a billion kilobytes."""
    long = "a" * 1_000_000
    ranks = {"a": 3.0, long[1:]: 1.0, long: 0.0, "ba": 2.0, "b": 4.0}
    assert list(merges_from_ranks(ranks)) == [(long[1:], "a"), ("a", long[1:]), ("b", "a")]


# ---- B15: end ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9, 8]}, {"eos_token_id": 7}, (7, 9, 8)),
        ({"eos_token_id": 9}, {"eos_token_id": 7}, (9,)),
        ({"eos_token_id": None}, {"eos_token_id": [7, 9]}, (7, 9, 257)),
        ({}, {"eos_token_id": [7, 257]}, (7, 257)),
        (None, {"eos_token_id": 7}, (7, 257)),
        (None, {"eos_token_id": None}, (257,)),
        (None, {}, (257,)),
        (None, None, (257,)),
    ],
)
def test_end_ids(
    generation: dict[str, Any] | None,
    config: dict[str, Any] | None,
    expected: tuple[int, ...],
    tmp_path: Path,
) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert load_generation_config(tmp_path, byte_level()).eos_token_ids == expected


def test_sampling_defaults(tmp_path: Path) -> None:
    content = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True, "repetition_penalty": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    found = load_generation_config(tmp_path)
    assert (found.temperature, found.top_p, found.top_k, found.do_sample) == (0.6, 0.9, 20, True)
    assert (found.repetition_penalty, found.min_p, found.eos_token_ids) == (None, None, ())


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 0.5}, "top_k"),
        ({"top_p": True}, "top_p"),
        ({"do_sample": 1}, "do_sample"),
        ([], "JSON object"),
    ],
)
def test_a_malformed_generation_config_is_refused(content: Any, field: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=field):
        load_generation_config(tmp_path)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_config_that_is_no_plain_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)  # nobody will ever write to it
    with pytest.raises(ModelLoadError, match=rf"{name}: cannot be read: is not a plain file"):
        load_generation_config(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ModelLoadError, match=rf"{name}: cannot be read: is not a plain file"):
        load_generation_config(tmp_path)


def test_the_texts_are_varied() -> None:
    texts = varied_texts(300)
    assert len(set(texts)) > 290
    assert any(c in "".join(texts) for c in string.digits)
    assert max(map(ord, "".join(texts))) > 0xFFFF
