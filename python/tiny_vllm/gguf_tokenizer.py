"""The tokenizer files of a Hugging Face folder, rebuilt from the `tokenizer.*` metadata of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .bpe import BYTE, NORMAL, SPLIT_STYLES, byte_level_bpe, library_faults, sentencepiece_bpe
from .errors import ModelLoadError
from .gguf_file import GGUFFile


def write_tokenizer(file: GGUFFile, config: dict[str, Any], folder: Path) -> None:
    """Rebuilds the tokenizer in `folder`. A file without a vocabulary gives no tokenizer files."""
    kind = file.get("tokenizer.ggml.model", str, "none")
    generation: dict[str, Any] = {}
    if kind in ("none", "no_vocab"):
        _write_json(folder / "generation_config.json", generation)
        return
    tokens = _string_list(file, "tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(types) != len(tokens) or len(tokens) > config["vocab_size"]:
        raise ModelLoadError(
            f"{file.path}: {len(tokens)} tokens, {len(types)} token types and {config['vocab_size']} rows in "
            "'token_embd.weight' do not fit together"
        )
    known_types = range(NORMAL, BYTE + 1)
    for text, number in zip(tokens, types, strict=True):
        if isinstance(number, bool) or not isinstance(number, int) or number not in known_types:
            raise ModelLoadError(
                f"{file.path}: 'tokenizer.ggml.token_type' of {text[:60]!r} is {number!r:.60}, not a whole "
                f"number from {NORMAL} to {BYTE}"
            )
    seen: set[str] = set()
    for text in tokens:
        if text in seen:
            raise ModelLoadError(f"{file.path}: 'tokenizer.ggml.tokens' has {text[:60]!r} twice")
        seen.add(text)

    def token(name: str) -> str | None:
        index = file.get(f"tokenizer.ggml.{name}_token_id", int)
        if index is not None and not 0 <= index < len(tokens):
            raise ModelLoadError(
                f"{file.path}: 'tokenizer.ggml.{name}_token_id' is {index}, not in 0..{len(tokens) - 1}"
            )
        return None if index is None else tokens[index]

    style = None
    if kind == "gpt2":
        pre = file.get("tokenizer.ggml.pre", str, "absent")
        style = SPLIT_STYLES.get(pre)
        if style is None:
            raise ModelLoadError(
                f"{file.path}: 'tokenizer.ggml.pre' is {pre!r}, so that it is not known how text is cut into "
                f"words; known are {', '.join(SPLIT_STYLES)}; use the model's Hugging Face folder"
            )
    elif kind != "llama":
        raise ModelLoadError(
            f"{file.path}: 'tokenizer.ggml.model' is {kind!r}; gpt2 (byte-level BPE) and llama are known"
        )
    special = {name: token(name) for name in ("bos", "eos", "unknown", "padding")}
    ends: dict[str, str | None] = {}
    for name, default in (("bos", style.adds_bos if style else True), ("eos", False)):
        adds = file.get(f"tokenizer.ggml.add_{name}_token", bool, default)
        ends[name] = special[name] if adds else None
        if adds and special[name] is None:
            raise ModelLoadError(
                f"{file.path}: the tokenizer adds {name}, but 'tokenizer.ggml.{name}_token_id' is absent"
            )
    try:
        with library_faults(ModelLoadError, "the tokenizer cannot be rebuilt"):
            if style is not None:
                merges = [_split_merge(text) for text in _string_list(file, "tokenizer.ggml.merges")]
                tokenizer = byte_level_bpe(tokens, merges, types, style, **ends)
            else:
                scores = file.get("tokenizer.ggml.scores", list)
                if scores is None or len(scores) != len(tokens):
                    raise ModelLoadError("'tokenizer.ggml.scores' is absent or not one per token")
                prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
                tokenizer = sentencepiece_bpe(tokens, scores, types, prefix, **ends)
    except ModelLoadError as error:
        raise ModelLoadError(f"{file.path}: {error}") from None
    tokenizer.save(str(folder / "tokenizer.json"))

    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    about["model_max_length"] = config["max_position_embeddings"]
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    about.update({names[name]: text for name, text in special.items() if text is not None})
    about["add_bos_token"], about["add_eos_token"] = ends["bos"] is not None, ends["eos"] is not None
    template = _read_chat_template(file)
    if template is not None:
        about["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", about)

    ids = {name: file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")}
    ends_turn = list(dict.fromkeys(tokens.index(t) for t in map(token, ids) if t is not None))
    for name in ("bos_token_id", "pad_token_id"):
        if name in config:
            generation[name] = config[name]
    if ends_turn:
        generation["eos_token_id"] = ends_turn if len(ends_turn) > 1 else ends_turn[0]
    _write_json(folder / "generation_config.json", generation)


def _string_list(file: GGUFFile, key: str) -> list[str]:
    values: list[str] | None = file.get(key, list)
    if not values or not all(isinstance(v, str) for v in values):
        raise ModelLoadError(f"{file.path}: metadata '{key}' is absent, empty, or not a list of strings")
    return values


def _split_merge(text: str) -> tuple[str, str]:
    """The two halves of "left right". The space between is never the first: a piece may begin with one."""
    at = text.find(" ", 1)
    if at < 0 or at == len(text) - 1:
        raise ModelLoadError(
            f"'tokenizer.ggml.merges' has {text[:60]!r}, not two pieces with a space between"
        )
    return text[:at], text[at + 1 :]


def _read_chat_template(file: GGUFFile) -> str | list[dict[str, str]] | None:
    default: str | None = file.get("tokenizer.chat_template", str)
    names = file.get("tokenizer.chat_templates", list, [])
    if not names:
        return default
    named = [{"name": n, "template": file.get(f"tokenizer.chat_template.{n}", str, "")} for n in names]
    return [*([{"name": "default", "template": default}] if default else []), *named]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
