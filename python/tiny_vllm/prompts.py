"""From what a caller gives as a prompt to token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tiny_vllm.bpe import byte_alphabet
from tiny_vllm.errors import InvalidRequestError, shown
from tiny_vllm.tokenizer import Tokenizer

# Text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


class Prompts:
    """Reads prompts for one model. `tokenizer` is None when it has none; `room` is its most tokens, and no
    more than `max_model_len`.
    """

    def __init__(self, tokenizer: Tokenizer | None, folder: Path, room: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._room = room
        self._max_model_len = max_model_len

    def read(self, prompt: Prompt, truncate: int | None = None) -> tuple[str | None, list[int]]:
        """Text (None for ids) and token ids of a prompt: with `truncate` the last ones, as in
        SamplingParams.truncate_prompt_tokens. The text is not cut. Raises InvalidRequestError.
        """
        if truncate is None:
            return self._read(prompt, is_cut=False)
        if truncate > self._max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at most max_model_len, {self._max_model_len}, got {truncate}"
            )
        text, ids = self._read(prompt, is_cut=True)
        return text, ids[-(truncate if truncate > 0 else max(1, self._room - 1)) :]

    def _read(self, prompt: Prompt, is_cut: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if not keys or not keys <= {"prompt", "prompt_token_ids"}:
                raise InvalidRequestError(
                    f"a prompt dict has 'prompt' or 'prompt_token_ids', got {shown(list(prompt))}"
                )
            text = prompt.get("prompt")
            if text is not None and not isinstance(text, str):
                raise InvalidRequestError(
                    f"'prompt' of a prompt dict must be text, got {type(text).__name__}"
                )
            if "prompt_token_ids" in keys:
                return text, _checked_ids(prompt["prompt_token_ids"], "prompt_token_ids must be a list")
            if text is None:
                raise InvalidRequestError("'prompt' of a prompt dict must be text, got None")
            prompt = text
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequestError(f"{self._folder} has no tokenizer; give the prompt as token ids")
            if not is_cut:
                self._check_length(prompt)
            return prompt, self._tokenizer.encode(prompt)
        return None, _checked_ids(prompt, "prompt must be text or a list")

    def ids_of_words(self, words: Sequence[str]) -> list[list[int]]:
        """SamplingParams.bad_words as ids: each word as it stands at the start of a text, and after a space.

        As in vLLM, the second counts only where the space is part of the first token and costs no other.
        """
        result: list[list[int]] = []
        for word in words:
            if self._tokenizer is None:
                raise InvalidRequestError(
                    f"bad_words cannot be used: {self._folder} has no tokenizer to turn them into tokens"
                )
            bare, spaced = (
                self._tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)
                for prefix in ("", " ")
            )
            if not bare:
                raise InvalidRequestError(f"bad_words: the model's tokenizer has no token for {shown(word)}")
            result.append(bare)
            if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
                result.append(spaced)
        return result

    def read_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool, is_cut: bool = False
    ) -> dict[str, Any]:
        """The prompt of a conversation, by the model's own template. Raises InvalidRequestError.

        With `is_cut` it may be as long as it likes, because read() will cut it.
        """
        require_list_of_messages(messages)
        if self._tokenizer is None:
            raise InvalidRequestError(f"{self._folder} has no tokenizer, so there is no chat template")
        text = self._tokenizer.apply_chat_template(
            [_with_plain_content(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
        )
        if not is_cut:
            self._check_length(text)
        # The template writes the begin token itself; encode() must not add a second one.
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

    def _check_length(self, text: str) -> None:
        """Refuses a text that is certainly too long, without the seconds that it takes to encode it."""
        if len(text) <= 64 * self._room:  # that is quick anyway
            return
        fewest = self._length_limit.fewest_tokens(text) if self._length_limit is not None else 0
        if fewest > self._room:
            raise InvalidRequestError(
                f"prompt has {len(text)} characters, at least {fewest} tokens; there is room for "
                f"{self._room}. Shorten the prompt."
            )

    @cached_property
    def _length_limit(self) -> LengthLimit | None:
        assert self._tokenizer is not None
        return length_limit(self._tokenizer)


class LengthLimit(NamedTuple):
    """How much of a text one token can stand for."""

    longest: int  # characters or bytes, at most
    lost: bytes  # bytes that are in no token, and vanish

    def fewest_tokens(self, text: str) -> int:
        """The text has this many tokens, or more."""
        kept = len(text.encode("utf-8", "replace").translate(None, self.lost)) if self.lost else len(text)
        return kept // self.longest


def length_limit(tokenizer: Tokenizer) -> LengthLimit | None:
    """The limit of a tokenizer, or None if there may be none.

    There is one for BPE that spells bytes, when no step before it drops characters. With others a text of
    blanks, or of letters that the vocabulary lacks, may give no token at all, however long it is.
    """
    backend = tokenizer.backend
    vocabulary = backend.get_vocab(with_added_tokens=True)
    normalizer, pre_tokenizer = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
    if tokenizer.is_byte_level:
        spells = any(part.get("type") == "ByteLevel" for part in pre_tokenizer)
        spelt = byte_alphabet()
    else:
        spells = getattr(backend.model, "byte_fallback", False)
        spelt = [f"<0x{byte:02X}>" for byte in range(256)]
    lost = bytes(byte for byte, piece in enumerate(spelt) if piece not in vocabulary)
    added = backend.get_added_tokens_decoder().values()
    if (
        type(backend.model).__name__ != "BPE"
        or not spells
        or (lost and (normalizer or not tokenizer.is_byte_level))
        or any(token.lstrip or token.rstrip for token in added)  # these swallow the blanks beside them
        or not all(map(_keeps_characters, normalizer + pre_tokenizer))
    ):
        return None
    # In UTF-8 a piece is as long as the bytes that it stands for, or longer. NFC makes one character of four
    # at most.
    return LengthLimit(4 * max(len(piece.encode()) for piece in vocabulary), lost)


def _parts(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as in tokenizer.json."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    parts = state.get("normalizers") or state.get("pretokenizers")
    return [state] if parts is None else list(parts)


def _keeps_characters(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    if kind == "Replace":
        return len(part.get("pattern", {}).get("String", "  ")) == 1 and part.get("content", "") != ""
    if kind == "Split":
        return part.get("behavior") != "Removed"
    return kind in ("NFC", "Prepend", "ByteLevel", "Metaspace", "Digits")


def _with_plain_content(message: Message) -> Message:
    """Text in parts, as in ``[{"type": "text", "text": "hi"}]``, is joined by newlines, as in vLLM."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list):
        return message
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                "content of a message must be text, or a list of parts {'type': 'text', 'text': ...}, "
                f"got a part {shown(kind if kind not in (None, 'text') else part)}"
            )
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def _checked_ids(ids: object, wanted: str) -> list[int]:
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray)):
        raise InvalidRequestError(f"{wanted} of token ids, got {type(ids).__name__}")
    checked: list[int] = list(ids)
    for token in checked:
        if isinstance(token, bool) or not isinstance(token, int) or not -(2**31) <= token < 2**31:
            raise InvalidRequestError(
                f"prompt token ids must be integers of the vocabulary, got {shown(token)}"
            )
    return checked


def is_single(prompts: object) -> bool:
    """Whether this is one prompt: text, a dict, or a list of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)


def require_list_of_messages(messages: object) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            'messages must be a list like [{"role": "user", "content": "Hello"}], or a list of such lists, '
            f"got {type(messages).__name__}"
        )
