"""Ids to text while they arrive, in pieces that never have to be taken back.

Decoding each token alone goes wrong in two ways. A character outside ASCII is several bytes, and a token may
hold some of them only. And SentencePiece drops the space before the first word of whatever it decodes, so
that, token by token, all spaces are lost. The law of this module: the pieces, joined, are what decoding all
ids at once gives.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from .errors import InternalError
from .tokenizer import Tokenizer


class Detokenizer:
    """The text of one output.

        detokenizer = Detokenizer(tokenizer, prompt_ids)
        for ids in steps:
            print(detokenizer.add(ids), end="")
        print(detokenizer.finish())

    The work per token does not grow with the length of the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        """The output continues the prompt: its first word keeps its space, and a character that the prompt
        left unfinished belongs to the output. With `skip_special_tokens`, special tokens give no text; else,
        without `spaces_between_special_tokens`, what the decoder puts between two of them is left out. As in
        vLLM, that concerns all tokens that were added to the vocabulary.
        """
        self._pieces: list[str] = []
        self._finished = False
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._bare: dict[int, str] = {}  # tokens that are shown as they are after another one of them
        if not skip_special_tokens and not spaces_between_special_tokens:
            added = tokenizer.backend.get_added_tokens_decoder()
            self._bare = {token_id: token.content for token_id, token in added.items()}
        self._last_is_bare = False
        self._method: _Bytes | _Window
        if tokenizer.is_byte_level:
            self._method = _Bytes(tokenizer, prompt_ids)
        else:
            self._method = _Window(tokenizer, (i for i in reversed(prompt_ids) if self._has_text(i)))

    def add(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that is now certain: it may be empty while bytes wait."""
        if self._finished:
            raise InternalError("Detokenizer.add after finish")
        # A skipped token, or the id of a padding row, is as good as absent: the bytes around it may still
        # form one character.
        shown = [i for i in ids if self._has_text(i)]
        piece = "".join(map(self._add_one, shown)) if self._bare else self._method.add(shown)
        self._pieces.append(piece)
        return piece

    def _add_one(self, token_id: int) -> str:
        piece = self._method.add([token_id])
        is_bare = token_id in self._bare
        if is_bare and self._last_is_bare:
            piece = self._bare[token_id]
        self._last_is_bare = is_bare
        return piece

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.backend.id_to_token(token_id) is not None

    def finish(self) -> str:
        """The rest: bytes that waited for others that will not come show as U+FFFD."""
        if self._finished:
            return ""
        self._finished = True
        self._pieces.append(self._method.finish())
        return self._pieces[-1]

    @property
    def text(self) -> str:
        """All pieces so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]


class _Bytes:
    """For byte-level tokenizers: the bytes in a row, read as UTF-8 as far as characters are complete."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.add(prompt_ids[-4:])  # an unfinished character has at most three bytes so far

    def add(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """For all others: decode a few known tokens with the new ones behind them, and take off the known text.

    The known tokens are those given out last. They take what happens at the start of a text (the lost space)
    upon themselves. Tokens of single bytes wait until a token of another kind ends their row: `tokenizers`
    reads such a row as a whole, and shows all of it as U+FFFD when any part of it is not UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_from_end: Iterable[int]):
        self._tokenizer = tokenizer
        self._known: list[int] = []
        self._waiting: list[int] = []  # single bytes all of them
        for token_id in prompt_from_end:
            self._known.insert(0, token_id)
            if not tokenizer.is_single_byte(token_id) and self._decode(self._known):
                break

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def add(self, ids: Sequence[int]) -> str:
        bytes_at_end = 0
        for token_id in reversed(ids):
            if not self._tokenizer.is_single_byte(token_id):
                break
            bytes_at_end += 1
        self._waiting.extend(ids)
        return self._take(len(self._waiting) - bytes_at_end) if bytes_at_end < len(ids) else ""

    def finish(self) -> str:
        return self._take(len(self._waiting))

    def _take(self, count: int) -> str:
        """The text of the first `count` waiting tokens."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        before, after = self._decode(self._known), self._decode(self._known + taken)
        piece = after[_common_length(before, after) :]
        # A first space vanishes and leaves nothing that could stand for the start of a text: then keep more.
        longer = (taken, self._known[-1:] + taken, self._known + taken)
        self._known = next((ids for ids in longer if self._decode(ids)), longer[-1])
        return piece


def _common_length(a: str, b: str) -> int:
    """Of how many characters the longest common beginning is."""
    if b.startswith(a):
        return len(a)
    return next(i for i, (x, y) in enumerate(zip(a, b + "\0", strict=False)) if x != y)
