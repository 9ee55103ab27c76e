"""Tokenizers of a few hundred tokens, built in memory, whose every id is known."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tiny_vllm.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

# Written out, and not taken from the code under test: GPT-2's spelling of the bytes 0 to 255.
BYTES = (
    [chr(0x100 + b) for b in range(33)]
    + [chr(b) for b in range(33, 127)]
    + [chr(0x100 + 33 + i) for i in range(34)]
    + [chr(b) for b in range(161, 173)]
    + [chr(0x100 + 67)]
    + [chr(b) for b in range(174, 256)]
)


def spell(data: bytes) -> str:
    return "".join(BYTES[b] for b in data)


def byte_level_backend(
    chunks: Iterable[bytes] = (), special: Sequence[str] = ("<|bos|>", "<|eos|>"), merges: Sequence[Any] = ()
) -> Backend:
    """Ids 0 to 255 are the bytes; then come `chunks`, then the special tokens."""
    vocab = {char: i for i, char in enumerate(BYTES)}
    for chunk in chunks:
        vocab.setdefault(spell(chunk), len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return backend


def byte_level(chunks: Iterable[bytes] = (), special: Sequence[str] = ("<|bos|>", "<|eos|>")) -> Tokenizer:
    return Tokenizer(byte_level_backend(chunks, special), {"bos_token": "<|bos|>", "eos_token": "<|eos|>"})


PIECES = ["▁", "▁I", "▁am", "▁here", "I", "am", "한", "é", "a", "b", "▁▁", "\n", "�", "<0xZZ>"]


def sentencepiece_backend(pieces: Sequence[str] = PIECES, strip: bool = True) -> Backend:
    """Ids 0 to 2 are <unk>, <s> and </s>, 3 to 258 the bytes, then come `pieces`: as Llama 2 has it."""
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *pieces]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if strip else []),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens[:3]])
    return backend


def sentencepiece(pieces: Sequence[str] = PIECES, strip: bool = True) -> Tokenizer:
    return Tokenizer(sentencepiece_backend(pieces, strip), {"bos_token": "<s>", "eos_token": "</s>"})


def write_folder(
    folder: Path, backend: Backend | dict[str, Any], config: dict[str, Any] | None = None
) -> Path:
    """A folder with tokenizer.json (a backend, or its JSON) and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    text = backend.to_str() if isinstance(backend, Backend) else json.dumps(backend, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, ensure_ascii=False), encoding="utf-8")
    return folder
