"""From what a caller gives as a prompt to token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tiny_vllm.bpe import byte_alphabet
from tiny_vllm.errors import InvalidRequestError, shown
from tiny_vllm.tokenizer import Tokenizer

# Text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


class Prompts:
    """Reads prompts for one model. `tokenizer` is None when it has none; `room` is its most tokens."""

    def __init__(self, tokenizer: Tokenizer | None, folder: Path, room: int) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._room = room

    def read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text (None for ids) and token ids of a prompt. Raises InvalidRequestError."""
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
            self._check_length(prompt)
            return prompt, self._tokenizer.encode(prompt)
        return None, _checked_ids(prompt, "prompt must be text or a list")

    def read_chat(self, messages: Sequence[Message], add_generation_prompt: bool) -> dict[str, Any]:
        """The prompt of a conversation, by the model's own template. Raises InvalidRequestError."""
        require_list_of_messages(messages)
        if self._tokenizer is None:
            raise InvalidRequestError(f"{self._folder} has no tokenizer, so there is no chat template")
        text = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt
        )
        self._check_length(text)
        # The template writes the begin token itself; encode() must not add a second one.
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

    def _check_length(self, text: str) -> None:
        """Refuses a text that is certainly too long, without the seconds that it takes to encode it."""
        if len(text) <= 64 * self._room:  # that is quick anyway
            return
        longest = self._longest_token
        if longest is not None and len(text) > longest * self._room:
            raise InvalidRequestError(
                f"prompt has {len(text)} characters, at least {len(text) // longest} tokens; there is room "
                f"for {self._room}. Shorten the prompt."
            )

    @cached_property
    def _longest_token(self) -> int | None:
        """No token stands for more characters of a text than this; None: there may be no such limit."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        return longest_token(tokenizer)


def longest_token(tokenizer: Tokenizer) -> int | None:
    """The most characters of a text that one token can stand for, or None if that cannot be said.

    It can for BPE that spells all bytes, when no step before it drops characters: otherwise a text of blanks,
    or of letters that the vocabulary lacks, may give no token at all, however long it is.
    """
    backend = tokenizer.backend
    vocabulary = backend.get_vocab(with_added_tokens=True)
    spelt = byte_alphabet() if tokenizer.is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    has_all_bytes = all(piece in vocabulary for piece in spelt) and (
        tokenizer.is_byte_level or getattr(backend.model, "byte_fallback", False)
    )
    added = backend.get_added_tokens_decoder().values()
    if (
        type(backend.model).__name__ != "BPE"
        or not has_all_bytes
        or any(token.lstrip or token.rstrip for token in added)  # these swallow the blanks beside them
        or not all(map(_keeps_characters, _parts(backend.normalizer)))
        or not all(map(_keeps_characters, _parts(backend.pre_tokenizer)))
    ):
        return None
    # A piece has a character or more for each byte or character that it stands for. NFC makes one character
    # of four at most.
    return 4 * max(map(len, vocabulary))


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
