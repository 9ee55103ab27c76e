"""Text to token ids and back, with the files that come with a model.

The work is done by Hugging Face's `tokenizers` library; this module finds and checks the files, knows the
special tokens, and applies the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from .bpe import byte_alphabet, library_faults, load_tokenizer_model
from .chat_template import Message, compile_template, render_chat
from .errors import InvalidRequestError, ModelLoadError
from .plain_files import MAX_TEMPLATE_BYTES, MAX_VOCABULARY_BYTES, parse_json_object, read_json, read_text

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_OF = {char: byte for byte, char in enumerate(byte_alphabet())}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's tokenizer. Made with `Tokenizer.from_folder`; safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
        source: str = "tokenizer",
    ):
        """`special_tokens`: bos_token, eos_token, ... -> text. `chat_templates`: name -> Jinja source."""
        backend.no_truncation()  # some files are saved with a length to cut at or to pad to
        backend.no_padding()
        self.backend = backend
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        for template in self.chat_templates.values():
            compile_template(template)
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json (or tokenizer.model), tokenizer_config.json and chat_template.jinja.

        Raises ModelLoadError, naming the file, when they are missing, malformed, or would silently encode
        badly: a BPE vocabulary whose pieces no merge can build.
        """
        folder = Path(path)
        config = (
            read_json(folder / "tokenizer_config.json")
            if (folder / "tokenizer_config.json").is_file()
            else {}
        )
        special: dict[str, str] = {}
        for source in (folder / "special_tokens_map.json", None):
            values = config if source is None else (read_json(source) if source.is_file() else {})
            for name in _SPECIAL_NAMES:
                text = values.get(name)
                text = text.get("content") if isinstance(text, dict) else text
                if isinstance(text, str):
                    special[name] = text
        if (folder / "tokenizer.json").is_file():
            file = folder / "tokenizer.json"
            backend = _load_tokenizer_json(file)
        elif (folder / "tokenizer.model").is_file():
            file = folder / "tokenizer.model"
            backend = load_tokenizer_model(file)
            for name, texts in {
                "bos_token": ("<|begin_of_text|>", "<s>"),
                "eos_token": ("<|end_of_text|>", "</s>"),
            }.items():
                known = [text for text in texts if backend.token_to_id(text) is not None]
                special.update({name: known[0]} if known and name not in special else {})
        else:
            raise ModelLoadError(f"{folder}: has neither tokenizer.json nor tokenizer.model")
        _add_declared_tokens(backend, config, folder / "tokenizer_config.json")
        return cls(backend, special, _read_chat_templates(folder, config), str(file))

    # ---- ids -----------------------------------------------------------------------------------------------

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id. The model may have more rows: they are padding."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    # ---- text to ids and back ------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. With `add_special_tokens`, those that the model wants around a text (a begin
        token, for most) are put there, as the post-processor of tokenizer.json says.

        Special tokens spelt out in the text become their ids. Raises InvalidRequestError when `text` is not
        text.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"prompt: expected text, found {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequestError("prompt: holds half of a surrogate pair, which is not text") from None
        with library_faults(InvalidRequestError, "prompt: the model's tokenizer cannot encode it"):
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of all ids together. Bytes that are not UTF-8 show as U+FFFD, padding rows not at all."""
        with library_faults(InvalidRequestError, "ids: the model's tokenizer cannot decode them"):
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def _decoder_kinds(self) -> set[str]:
        decoder = self.backend.decoder
        return _all_kinds(json.loads(decoder.__getstate__())) if decoder is not None else set()

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether the text is simply the bytes of all tokens in a row, as with Llama 3, Qwen and GPT-2."""
        return "ByteLevel" in self._decoder_kinds and self._decoder_kinds <= {"ByteLevel", "Sequence", "Fuse"}

    def is_single_byte(self, token_id: int) -> bool:
        """Whether a token stands for one byte of a character that is not in the vocabulary (`<0xE2>`)."""
        return (
            "ByteFallback" in self._decoder_kinds
            and _byte_value(self.backend.id_to_token(token_id)) is not None
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text: maybe part of a character; nothing for an id of a padding row."""
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoder_kinds:
            # Added tokens may have letters that are not in the alphabet of bytes. Those stand for themselves.
            spelt = [_BYTE_OF.get(char, -1) for char in piece]
            return piece.encode("utf-8") if -1 in spelt else bytes(spelt)
        byte = _byte_value(piece) if "ByteFallback" in self._decoder_kinds else None
        return piece.replace("\u2581", " ").encode("utf-8") if byte is None else bytes([byte])

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text for people to read: part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    # ---- chat ----------------------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation, ending where the model is to go on.

        `chat_template` is the name of one of the model's templates or the source of another one; by default
        "tool_use" when there is one and `tools` are given, else "default". Other keywords reach the template
        by name. Raises InvalidRequestError when the model has no chat template or the messages do not suit
        it.
        """
        name = chat_template
        if name is None:
            name = "tool_use" if variables.get("tools") and "tool_use" in self.chat_templates else "default"
        template = self.chat_templates.get(name, chat_template)
        if template is None:
            known = ", ".join(self.chat_templates) or "none"
            raise InvalidRequestError(
                f"messages: {self.source} has no chat template named '{name}' (known: {known}); this may be "
                "a base model. Use plain completion, or pass chat_template"
            )
        return render_chat(template, messages, add_generation_prompt, **{**self.special_tokens, **variables})

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The ids of a conversation. The template writes all special tokens, so that none are added."""
        text = self.apply_chat_template(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)


# ---- files -------------------------------------------------------------------------------------------------


def _load_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    text = read_text(path, MAX_VOCABULARY_BYTES)
    _check_merges(parse_json_object(text, path), path)
    with library_faults(ModelLoadError, f"{path}: the tokenizer cannot be loaded"):
        backend = tokenizers.Tokenizer.from_str(text)
        backend.encode("")  # some faults show only now, such as special tokens that do not exist
        return backend


def _check_merges(content: dict[str, Any], path: Path) -> None:
    """Refuses a BPE model without merges whose vocabulary has pieces that only a merge can build."""
    model = content.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        if isinstance(model, dict) and isinstance(model.get("vocab"), list):
            return  # Unigram: a list of pieces with scores
        raise ModelLoadError(f"{path}: has no model with a vocabulary")
    if model.get("type") not in (None, "BPE") or (model.get("type") is None and "merges" not in model):
        return
    if model.get("merges") or model.get("ignore_merges"):
        return  # whether each merge names known pieces is checked by `tokenizers`
    added = content.get("added_tokens")
    names = (
        {token.get("content") for token in added if isinstance(token, dict)}
        if isinstance(added, list)
        else set()
    )
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    for piece in model["vocab"]:
        if (
            len(piece.removeprefix(prefix).removesuffix(suffix)) > 1
            and piece not in names
            and not _BYTE_TOKEN.fullmatch(piece)
        ):
            raise ModelLoadError(
                f"{path}: a BPE model without merges, although its vocabulary has pieces such as {piece!r} "
                "that only merges can build: text would be cut into single characters. The file is "
                "incomplete; convert it anew"
            )


def _add_declared_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], path: Path) -> None:
    """Adds the tokens that only tokenizer_config.json declares. Each must get the id given there."""
    declared = config.get("added_tokens_decoder")
    if declared is None:
        return
    try:
        rows = sorted((int(key), dict(value)) for key, value in declared.items())
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        for token_id, row in rows:
            if backend.token_to_id(row["content"]) is not None:
                continue
            token = tokenizers.AddedToken(
                row["content"], **{name: bool(row[name]) for name in flags if name in row}
            )
            backend.add_tokens([token])
            if backend.token_to_id(row["content"]) != token_id:
                raise ModelLoadError(
                    f"{path}: added token {row['content']!r} should have the id {token_id}, but the "
                    f"vocabulary gives it {backend.token_to_id(row['content'])}"
                )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path}: 'added_tokens_decoder' is malformed: {error!r}") from None


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files win over tokenizer_config.json, whose `chat_template` is a text or a list of named texts."""
    path = folder / "tokenizer_config.json"
    found: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        found["default"] = value
    elif isinstance(value, list):
        for entry in value:
            if not isinstance(entry, dict) or not all(
                isinstance(entry.get(k), str) for k in ("name", "template")
            ):
                raise ModelLoadError(
                    f"{path}: 'chat_template' has an entry that is not a name and a template"
                )
            found[entry["name"]] = entry["template"]
    elif value is not None:
        raise ModelLoadError(f"{path}: 'chat_template' is neither text nor a list of named texts")
    files = {"default": folder / "chat_template.jinja"}
    files.update({file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))})
    for name, file in files.items():
        if file.is_file():
            found[name] = read_text(file, MAX_TEMPLATE_BYTES)
    for name, template in found.items():
        try:
            compile_template(template)
        except ModelLoadError as error:
            raise ModelLoadError(f"{folder}: template '{name}': {error}") from None
    return found


def _all_kinds(state: Any) -> set[str]:
    kinds = {state.get("type", "")}
    for part in state.get("decoders") or ():
        kinds |= _all_kinds(part)
    return kinds


def _byte_value(piece: str | None) -> int | None:
    byte = _BYTE_TOKEN.fullmatch(piece or "")
    return int(byte[1], 16) if byte else None


# ---- generation_config.json --------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerationConfig:
    """What the model's makers say: the ids that end a text, and sampling values, None if not given."""

    eos_token_ids: tuple[int, ...] = ()
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def load_generation_config(folder: str | Path, tokenizer: Tokenizer | None = None) -> GenerationConfig:
    """Reads generation_config.json. If it does not say which ids end a text, config.json and tokenizer do.

    A chat model ends its turn with another token than a document, so that a list is common. The list of
    generation_config.json is taken as it is. Without one, the ids of config.json and the tokenizer's end
    token are put together: either alone is often the one that a chat never reaches.
    Raises ModelLoadError for a value of the wrong kind.
    """
    path = Path(folder) / "generation_config.json"
    values = read_json(path) if path.exists() else {}
    ids = _id_list(values.get("eos_token_id"), path)
    if not ids:
        config = Path(folder) / "config.json"
        ids = _id_list(read_json(config).get("eos_token_id") if config.exists() else None, config)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
    found: dict[str, Any] = {}
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "top_k", "do_sample"):
        value = values.get(name)
        kinds = {"do_sample": bool, "top_k": int}.get(name, (int, float))
        if value is None:
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and name != "do_sample"):
            raise ModelLoadError(
                f"{path}: '{name}' is {value!r:.60}, not a number" + " or null" * (name == "do_sample")
            )
        found[name] = value
    return GenerationConfig(eos_token_ids=tuple(dict.fromkeys(ids)), **found)


def _id_list(value: Any, path: Path) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise ModelLoadError(
                f"{path}: 'eos_token_id' is {value!r:.60}, not an id, a list of ids, or null"
            )
    return list(ids)
