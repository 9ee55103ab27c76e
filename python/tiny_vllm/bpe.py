"""Builds `tokenizers` tokenizers from raw vocabularies: GGUF metadata, tiktoken files, SentencePiece models.

All three come down to byte pair encoding (Sennrich et al., arXiv 1508.07909): cut the text into words, then
merge neighbouring pieces, best merge first. They differ in how the text is cut and in what the smallest piece
is.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import Error, ModelLoadError
from .plain_files import MAX_VOCABULARY_BYTES, read_plain_file


@contextmanager
def library_faults(kind: type[Error], what: str) -> Iterator[None]:
    """Turns whatever `tokenizers` raises into an error of this package: "what: why".

    It raises bare Exception, and where its Rust code panics a PanicException, which is not even that.
    """
    try:
        yield
    except (Error, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {error}") from None


# Token types, numbered alike in SentencePiece models and in GGUF files.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class SplitStyle:
    """How one family of byte-level tokenizers cuts text into words before it merges."""

    pattern: str | None = None  # words are matches of this; None: the pattern of GPT-2
    split_digits: bool = False  # each digit is a word
    nfc: bool = False  # text is brought to Unicode normal form C first
    ignore_merges: bool = False  # a word that is in the vocabulary is taken whole
    adds_bos: bool = False  # unless the file says otherwise

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if self.pattern is None and not self.split_digits:
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        first = (
            pre_tokenizers.Split(Regex(self.pattern), "isolated")
            if self.pattern is not None
            else pre_tokenizers.Digits(individual_digits=True)
        )
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        return pre_tokenizers.Sequence([first, byte_level])


# By the name that GGUF files use (`tokenizer.ggml.pre`).
SPLIT_STYLES: dict[str, SplitStyle] = {
    "gpt-2": SplitStyle(),
    "smollm": SplitStyle(split_digits=True),
    "llama-bpe": SplitStyle(LLAMA3_SPLIT, ignore_merges=True, adds_bos=True),
    "qwen2": SplitStyle(QWEN2_SPLIT, nfc=True),
    "deepseek-r1-qwen": SplitStyle(QWEN2_SPLIT, nfc=True),
}


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    types: Sequence[int],
    style: SplitStyle,
    bos: str | None = None,
    eos: str | None = None,
) -> Tokenizer:
    """A byte-level BPE tokenizer. Where each of the 256 bytes is a token, any text can be written.

    A byte that is none is left out of the ids, as Hugging Face does it; control characters can be such.

    `tokens` are in id order, bytes spelt in GPT-2's printable alphabet; `types` as numbered above. `bos` and
    `eos` are put around each text that is encoded with special tokens.
    """
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    model = models.BPE(vocab=vocab, merges=list(merges), ignore_merges=style.ignore_merges)
    tokenizer = Tokenizer(model)
    if style.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = style.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    _finish(tokenizer, tokens, types, bos, eos)
    return tokenizer


def sentencepiece_bpe(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    add_space_prefix: bool = True,
    bos: str | None = None,
    eos: str | None = None,
) -> Tokenizer:
    """A SentencePiece BPE model (Kudo and Richardson, arXiv 1808.06226) with byte fallback, as Llama 2 has.

    SentencePiece keeps no list of merges: it joins the neighbours whose concatenation has the highest score.
    Each way to cut a piece in two known pieces is therefore a merge, ordered by the score of the whole.
    Raises ModelLoadError when two pieces share a score, since their order is then not known, and for a score
    that is not a number.
    """
    for piece, score in zip(pieces, scores, strict=True):
        if isinstance(score, bool) or not isinstance(score, (int, float)) or math.isnan(score):
            raise ModelLoadError(
                f"SentencePiece vocabulary: the score of {piece[:60]!r} is {score!r:.60}, not a number"
            )
    normal = {p: -s for p, s, kind in zip(pieces, scores, types, strict=True) if kind == NORMAL}
    merges = list(merges_from_ranks(normal))
    seen: dict[float, str] = {}
    for piece in dict.fromkeys(left + right for left, right in merges):
        other = seen.setdefault(normal[piece], piece)
        if other != piece:
            raise ModelLoadError(
                f"SentencePiece vocabulary: {other!r} and {piece!r} have the same score {-normal[piece]}, so "
                "that the order of their merges is not known; use a folder with tokenizer.json"
            )
    unknown = next((p for p, kind in zip(pieces, types, strict=True) if kind == UNKNOWN), None)
    vocab = {piece: i for i, (piece, kind) in enumerate(zip(pieces, types, strict=True)) if kind != UNUSED}
    byte_fallback = sum(kind == BYTE for kind in types) == 256
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    )
    prefix = [normalizers.Prepend("\u2581")] if add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _finish(tokenizer, pieces, types, bos, eos)
    return tokenizer


def _finish(
    tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int], bos: str | None, eos: str | None
) -> None:
    """Declares the tokens that are matched before the text is cut, and the tokens put around it."""
    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    user = [t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])
    if bos is not None or eos is not None:
        ends = [(t, tokenizer.token_to_id(t)) for t in (bos, eos) if t is not None]
        single = " ".join([*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])])
        pair = f"{single} {single.replace(':0', ':1').replace('$A', '$B')}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=ends
        )


def merges_from_ranks(ranks: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """All ways to make a piece of two others, the pieces with the lowest rank first."""
    lengths = sorted(
        {len(piece) for piece in ranks}
    )  # trying all cuts of a very long piece would take for ever
    for piece in sorted(ranks, key=lambda p: ranks[p]):
        cuts = [(piece[:i], piece[i:]) for i in lengths[: bisect.bisect_left(lengths, len(piece))]]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        yield from sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))


# ---- tokenizer.model: two formats of one name --------------------------------------------------------------


def load_tokenizer_model(path: Path) -> Tokenizer:
    """Reads a `tokenizer.model`: a tiktoken list as Llama 3 has, or a SentencePiece BPE model as Llama 2 has.

    Raises ModelLoadError for anything else (a SentencePiece unigram model, a pointer file of Git LFS, ...).
    """
    data = read_plain_file(path, MAX_VOCABULARY_BYTES)
    if data.startswith(b"version https://git-lfs"):
        raise ModelLoadError(
            f"{path}: is a pointer of Git LFS, not the file itself; download it with `git lfs pull`"
        )
    first = data.split(b"\n", 1)[0].split(b" ")
    if len(first) == 2 and first[1].strip().isdigit():
        return _llama3_tokenizer(path, data)
    return _sentencepiece_tokenizer(path, data)


def byte_alphabet() -> list[str]:
    """GPT-2's printable spelling of the 256 bytes: printable Latin-1 characters stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelling = {b: chr(b) for b in printable}
    rest = (b for b in range(256) if b not in spelling)
    spelling.update({b: chr(256 + i) for i, b in enumerate(rest)})
    return [spelling[b] for b in range(256)]


def llama3_special_tokens(count: int = 256) -> list[str]:
    """The special tokens that follow the 128,000 of the file, in the names of Meta's `llama-models`."""
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        4: "<|finetune_right_pad_id|>",
        5: "<|step_id|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        8: "<|eom_id|>",
        9: "<|eot_id|>",
        10: "<|python_tag|>",
        11: "<|image|>",
    }
    reserved = iter(range(count))
    return [named.get(i) or f"<|reserved_special_token_{next(reserved)}|>" for i in range(count)]


def _llama3_tokenizer(path: Path, data: bytes) -> Tokenizer:
    alphabet = byte_alphabet()
    ranks: dict[str, float] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            spelt = "".join(alphabet[b] for b in base64.b64decode(token, validate=True))
            if int(rank) != len(ranks) or not spelt or spelt in ranks:
                raise ValueError
        except (ValueError, binascii.Error):
            raise ModelLoadError(
                f"{path}: line {number} is {line[:60]!r}; expected a new token in base64 and its rank "
                f"{len(ranks)}"
            ) from None
        ranks[spelt] = len(ranks)
    missing = [b for b in range(256) if alphabet[b] not in ranks]
    if missing:
        raise ModelLoadError(
            f"{path}: the byte {missing[0]:#04x} is not among the tokens: the file was cut short"
        )
    special = llama3_special_tokens()
    tokens = [*ranks, *special]
    types = [NORMAL] * len(ranks) + [CONTROL] * len(special)
    merges = list(merges_from_ranks(ranks))
    return byte_level_bpe(tokens, merges, types, SPLIT_STYLES["llama-bpe"], bos=special[0])


def _sentencepiece_tokenizer(path: Path, data: bytes) -> Tokenizer:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    model_type, dummy_prefix, charsmap, squeeze = (
        1,
        True,
        b"",
        True,
    )  # the defaults of sentencepiece_model.proto
    try:
        for field, value in _protobuf_fields(data):
            if field == 1:
                piece = dict(_protobuf_fields(_as_bytes(value)))
                pieces.append(_as_bytes(piece[1]).decode("utf-8"))
                scores.append(struct.unpack("<f", _as_bytes(piece.get(2, b"\0\0\0\0")))[0])
                types.append(_as_int(piece.get(3, NORMAL)))
            elif field == 2:
                model_type = _as_int(dict(_protobuf_fields(_as_bytes(value))).get(3, 1))
            elif field == 3:
                normalizer = dict(_protobuf_fields(_as_bytes(value)))
                charsmap = _as_bytes(normalizer.get(2, b""))
                dummy_prefix = bool(normalizer.get(3, 1))
                squeeze = bool(normalizer.get(4, 1))
    except (ValueError, KeyError, IndexError, struct.error):
        raise ModelLoadError(f"{path}: is neither a tiktoken list nor a SentencePiece model") from None
    if not pieces:
        raise ModelLoadError(
            f"{path}: is neither a tiktoken list nor a SentencePiece model: it has no pieces"
        )
    if model_type != 2 or charsmap or squeeze:
        kind = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}.get(model_type, str(model_type))
        raise ModelLoadError(
            f"{path}: a SentencePiece {kind} model with {'a' if charsmap or squeeze else 'no'} text "
            "normaliser; only BPE models without one (Llama 2, Mistral) can be read; use a folder with "
            "tokenizer.json"
        )
    bos = next((p for p, kind in zip(pieces, types, strict=True) if kind == CONTROL and p == "<s>"), None)
    return sentencepiece_bpe(pieces, scores, types, dummy_prefix, bos=bos)


def _protobuf_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (number, value) fields of a protobuf message: varints as int, all else as bytes.

    Raises ValueError or IndexError when it is not one.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("varint too long")

    while at < len(data):
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(wire) or (varint() if wire == 2 else -1)
        if size < 0 or at + size > len(data) or number == 0:
            raise ValueError("not a protobuf message")
        yield number, data[at : at + size]
        at += size


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes are due")
    return value


def _as_int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number is due")
    return value
