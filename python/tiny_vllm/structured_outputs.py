"""Outputs that keep to a JSON schema, a regular expression, a list of choices or a grammar.

Before each token a grammar says which ones may come, and all others get the logit -infinity. The grammar
itself is the work of a library, llguidance, whose parser walks the text along with the tokens
(https://github.com/guidance-ai/llguidance says how). Here it is only asked.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from tiny_vllm.errors import InvalidRequestError, shown
from tiny_vllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_CHOICES = 10_000  # it takes a second to understand so many, and the time grows with the square
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputsParams:
    """What the text of an output must look like. Exactly one of the first five is given; names are vLLM's.

    Args:
        json: a JSON schema, as a dict or as text. What the schema says and the grammar cannot keep to, as
            ``uniqueItems``, is refused.
        regex: the whole text matches it (the syntax of Rust's regex crate, without look-around).
        choice: the text is one of these.
        grammar: a context-free grammar in Lark's syntax, or in GBNF (``root ::= ...``).
        json_object: any JSON object.
        disable_any_whitespace: JSON without spaces and line breaks. Small models may go on with these for
            ever.
        whitespace_pattern: a regular expression of what may stand between the parts of JSON.

    Raises:
        InvalidRequestError: none or several are given, or one has the wrong type. What is wrong inside is
            found when a request uses it.
    """

    def __init__(
        self,
        json: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        disable_any_whitespace: bool = False,
        whitespace_pattern: str | None = None,
        **unsupported: Any,
    ) -> None:
        for name in unsupported:
            raise InvalidRequestError(f"structured_outputs has no field {name!r}")
        if json_object is not None and not isinstance(json_object, bool):
            raise InvalidRequestError(
                f"structured_outputs.json_object must be a bool, got {shown(json_object)}"
            )
        self.json = json
        self.regex = regex
        self.choice = choice if choice is None or isinstance(choice, str) else list(choice)
        self.grammar = grammar
        self.json_object = json_object or None
        self.disable_any_whitespace = disable_any_whitespace
        self.whitespace_pattern = whitespace_pattern
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, "
                f"got {', '.join(given) or 'none'}"
            )
        self.kind = given[0]
        schema: object = json
        if not isinstance(schema, (str, Mapping, type(None))):
            hint = "; give its model_json_schema()" if hasattr(schema, "model_json_schema") else ""
            raise InvalidRequestError(
                f"structured_outputs.json must be a dict or a text, got {shown(schema)}{hint}"
            )
        for name, text in (
            ("regex", regex),
            ("grammar", grammar),
            ("whitespace_pattern", whitespace_pattern),
        ):
            if text is not None and (not isinstance(text, str) or not text or not _is_unicode(text)):
                raise InvalidRequestError(f"structured_outputs.{name} must be a text, got {shown(text)}")
        if choice is not None and (
            isinstance(self.choice, str)
            or not self.choice
            or not all(isinstance(text, str) and text and _is_unicode(text) for text in self.choice)
        ):
            raise InvalidRequestError(
                f"structured_outputs.choice must be a list of texts that are not empty, got {shown(choice)}"
            )
        if self.choice is not None and len(self.choice) > _MOST_CHOICES:
            raise InvalidRequestError(
                f"structured_outputs.choice has {len(self.choice)} texts, and may have {_MOST_CHOICES}"
            )
        if not isinstance(disable_any_whitespace, bool):
            raise InvalidRequestError(
                "structured_outputs.disable_any_whitespace must be True or False, "
                f"got {shown(disable_any_whitespace)}"
            )
        if (disable_any_whitespace or whitespace_pattern is not None) and self.kind not in (
            "json",
            "json_object",
        ):
            raise InvalidRequestError(
                "structured_outputs: disable_any_whitespace and whitespace_pattern concern JSON, not "
                f"{self.kind}"
            )
        if disable_any_whitespace and whitespace_pattern is not None:
            raise InvalidRequestError(
                "structured_outputs: give disable_any_whitespace or whitespace_pattern, not both"
            )

    def __repr__(self) -> str:
        fields = {k: v for k, v in vars(self).items() if k != "kind" and v is not None and v is not False}
        return f"StructuredOutputsParams({', '.join(f'{k}={v!r}' for k, v in fields.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StructuredOutputsParams) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def to_grammar(self) -> str:
        """The same for llguidance. Raises InvalidRequestError for what no grammar can be made of."""
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import gbnf_to_lark

        if self.json is not None or self.json_object:
            schema = {"type": "object"} if self.json is None else self.json
            text = schema if isinstance(schema, str) else _as_json(schema)
            options: dict[str, Any] = {"whitespace_flexible": not self.disable_any_whitespace}
            if self.whitespace_pattern is not None:
                options["whitespace_pattern"] = self.whitespace_pattern
            try:
                return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
            except ValueError as error:
                raise InvalidRequestError(f"structured_outputs.json: {_in_one_line(error)}") from None
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            # A Lark string is written like one of JSON.
            alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in self.choice)
            return LLMatcher.grammar_from_lark(f"start: {alternatives}")
        assert self.grammar is not None
        if "::=" not in self.grammar:
            return LLMatcher.grammar_from_lark(self.grammar)
        try:
            return LLMatcher.grammar_from_lark(gbnf_to_lark(self.grammar))
        except Exception as error:  # no common class
            raise InvalidRequestError(f"structured_outputs.grammar (GBNF): {_in_one_line(error)}") from None


class Guide:
    """Which tokens may come next in one sequence. The work of its own is one set of tokens for each token."""

    def __init__(self, guides: Guides, matcher: LLMatcher) -> None:
        self._guides = guides
        self._matcher = matcher
        self.error = ""  # why it can say nothing any more
        self.is_complete = False  # nothing may follow
        self.allowed = b""
        self._look()

    def copy(self) -> Guide:
        other: Guide = object.__new__(Guide)
        other.__dict__.update(self.__dict__)
        other._matcher = self._matcher.deep_copy()
        return other

    def take(self, token: int) -> None:
        """The next token of the sequence has been chosen, and the sequence goes on."""
        if self.is_complete or self.error:
            return
        self._matcher.consume_token(token)
        # Nothing may follow: not even the model's end token is needed to know that.
        self.is_complete = self._matcher.is_stopped()
        self._look()

    def _look(self) -> None:
        allowed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self.error = f"structured_outputs: {_in_one_line(self._matcher.get_error())}"
        self.allowed = self._guides.for_model(allowed)


class Guides:
    """Makes the guides of one model. Several threads may do so at a time."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        folder: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos = [i for i in eos_token_ids if i < vocab_size]
        self._ll_tokenizer: LLTokenizer | None = None
        # The same schema comes again and again, and takes its time to be understood.
        self._compiled = functools.lru_cache(maxsize=64)(self._compile)

    def make(self, params: StructuredOutputsParams) -> Guide:
        """The guide of an output that has no token yet.

        Raises:
            InvalidRequestError: the model has no tokenizer, or the grammar is none; says which field and why.
        """
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"structured_outputs cannot be used: {self._folder} has no tokenizer to know its tokens by"
            )
        return self._compiled(params.kind, params.to_grammar()).copy()

    def _compile(self, kind: str, grammar: str) -> Guide:
        from llguidance import LLMatcher

        tokens = self._tokens()
        problem = LLMatcher.validate_grammar(grammar, tokens)
        if problem and not problem.startswith("WARNING"):
            raise InvalidRequestError(f"structured_outputs.{kind}: {_reason(problem)}")
        guide = Guide(self, LLMatcher(tokens, grammar, log_level=0))
        if guide.error:
            raise InvalidRequestError(f"structured_outputs.{kind}: {guide.error.partition(': ')[2]}")
        if not self._allows_text(guide.allowed):
            raise InvalidRequestError(f"structured_outputs.{kind}: nothing but the empty text matches it")
        return guide

    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        assert self._tokenizer is not None
        # It takes a second with a large vocabulary. Two threads may make one each: with a lock, a fork() in
        # that second would leave the child waiting for ever.
        if self._ll_tokenizer is None:
            vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos)
            self._ll_tokenizer = LLTokenizer(
                vocabulary,  # type: ignore[arg-type]
                n_vocab=len(vocabulary.tokens),
                eos_token=self._eos or [self._vocab_size],
            )
        return self._ll_tokenizer

    def _allows_text(self, allowed: bytes) -> bool:
        bits = np.unpackbits(np.frombuffer(allowed, dtype=np.uint8), bitorder="little")
        bits[self._eos] = 0
        return bool(bits.any())

    def for_model(self, allowed: bytes) -> bytes:
        """The set of tokens without what the model does not have, in words of 32 bits."""
        words = np.zeros((self._vocab_size + 31) // 32, dtype="<u4")
        given = np.frombuffer(allowed, dtype="<u4")[: len(words)]
        words[: len(given)] = given
        if self._vocab_size % 32:
            words[-1] &= (1 << self._vocab_size % 32) - 1
        return words.tobytes()


class _Vocabulary:
    """The tokens as llguidance asks for them."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        # In a text that a grammar asks for, "<|end|>" is seven letters and not the token of that name.
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = True
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        if not eos:  # it must have one; this one the model cannot choose
            self.tokens.append(b"<end>")
        self.eos_token_id = eos[0] if eos else vocab_size
        self.bos_token_id = tokenizer.bos_token_id
        special = {*tokenizer.special_ids, *eos, self.eos_token_id}
        self.special_token_ids = sorted(i for i in special if i < len(self.tokens))
        self._plain = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        self._longest = max(map(len, self._plain), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens that spell exactly this, or the beginning of it: where a grammar leaves one text only."""
        raw = text if isinstance(text, bytes) else text.encode("utf-8")
        ids = self._backend.encode(raw.decode("utf-8", errors="replace"), add_special_tokens=False).ids
        # A tokenizer may put a space in front (SentencePiece) or write letters in another way (NFC).
        is_plain = all(i < len(self.tokens) and self._plain.get(self.tokens[i]) == i for i in ids)
        if is_plain and b"".join(self.tokens[i] for i in ids) == raw:
            return list(ids)
        return self._spell(raw)

    def _spell(self, raw: bytes) -> list[int]:
        """The longest token that fits, again and again, up to where none does."""
        ids: list[int] = []
        at = 0
        while at < len(raw):
            sizes = range(min(self._longest, len(raw) - at), 0, -1)
            size = next((n for n in sizes if raw[at : at + n] in self._plain), 0)
            if size == 0:
                break
            ids.append(self._plain[raw[at : at + size]])
            at += size
        return ids


def _as_json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"structured_outputs.json is not JSON: {error}") from None


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)  # half of a surrogate pair


def _reason(problem: str) -> str:
    """llguidance's message as a sentence: without the drawing of the place, which needs lines to stand in."""
    in_regex = re.search(r"^error: (.*)$", problem, re.MULTILINE)
    if in_regex:
        return in_regex[1]
    lines = [line for line in problem.splitlines() if not re.match(r"\s*(\d+ \| |\^)", line)]
    return _in_one_line(re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", "\n".join(lines)))


def _in_one_line(message: object) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= 300 else f"{text[:297]}..."
