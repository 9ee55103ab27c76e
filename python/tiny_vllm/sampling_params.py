"""How the tokens of a request are chosen. Names, defaults and meaning are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from tiny_vllm import _core
from tiny_vllm.errors import InvalidRequestError, shown
from tiny_vllm.structured_outputs import StructuredOutputsParams

# vLLM's, that are not here; why, or what to use.
_NOT_HERE = {
    "logits_processors": "use logit_bias, allowed_token_ids, bad_words or structured_outputs",
    "guided_decoding": "its name is structured_outputs, as in newer versions of vLLM",
    "extra_args": "there are none",
}

# What concerns text and reports, and so not the core, which knows tokens only.
_PYTHONS_OWN = (
    "stop",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "output_kind",
    "structured_outputs",
)


class RequestOutputKind(IntEnum):
    """What each output of ``step()`` and ``start_stream()`` says."""

    CUMULATIVE = 0  # all that the request has so far
    DELTA = 1  # what is new since its last output
    FINAL_ONLY = 2  # all, at the end


def _integer(name: str, value: object, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(
            f"{name} must be an integer{' or None' if optional else ''}, got {shown(value)}"
        )
    if not -(2**63) <= value < 2**63:
        raise InvalidRequestError(f"{name} must fit in 64 bits, got {shown(value)}")


def _number(name: str, value: object) -> None:
    try:
        finite = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        finite = False
    if not finite:
        raise InvalidRequestError(f"{name} must be a finite number, got {shown(value)}")


def _ids(name: str, value: object) -> list[int]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} must be a list of integers, got {shown(value)}")
    ids = list(value)
    for token in ids:
        _integer(name, token)
        if not 0 <= token < 2**31:
            raise InvalidRequestError(f"{name} must be in the vocabulary, got {token}")
    return ids


def _biases(value: object) -> dict[int, float]:
    """Ids may be written as text, as JSON has them."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"logit_bias must be a dict of token ids and numbers, got {shown(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 11 else key
        (token,) = _ids("logit_bias", [token])
        _number(f"logit_bias of token {token}", bias)
        if not -100 <= bias <= 100:
            raise InvalidRequestError(
                f"logit_bias of token {token} must be in [-100, 100], got {shown(bias)}"
            )
        biases[token] = float(bias)
    return biases


def _words(value: object) -> list[str]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"bad_words must be a list of texts, got {shown(value)}")
    words = list(value)
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise InvalidRequestError(f"bad_words must be texts that are not blank, got {shown(word)}")
    return words


def _stops(value: object) -> list[str]:
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"stop must be a text or a list of texts, got {shown(value)}")
    stops = [value] if isinstance(value, str) else list(value)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise InvalidRequestError(f"stop must be texts that are not empty, got {shown(stop)}")
    return stops


def _output_kind(value: object) -> RequestOutputKind:
    if isinstance(value, bool) or not isinstance(value, int) or value not in tuple(RequestOutputKind):
        raise InvalidRequestError(
            f"output_kind must be RequestOutputKind.CUMULATIVE, DELTA or FINAL_ONLY, got {shown(value)}"
        )
    return RequestOutputKind(value)


def _structure(value: object) -> StructuredOutputsParams | None:
    if value is None:
        return None
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return StructuredOutputsParams(**value)
    if not isinstance(value, StructuredOutputsParams):
        raise InvalidRequestError(
            "structured_outputs must be StructuredOutputsParams, a dict of its fields, or None, "
            f"got {shown(value)}"
        )
    fields = {name: field for name, field in vars(value).items() if name != "kind"}
    return StructuredOutputsParams(**fields)  # a copy, and what was assigned is checked like arguments


class SamplingParams:
    """Parameters of one request.

    Args:
        n: outputs for one prompt. With a seed, output i draws from seed + i. At most ``max_num_seqs``.
        temperature: divides the logits before the draw; 0 always takes the most likely token (the lowest id
            on a tie).
        top_p: draw only from the fewest tokens whose probabilities reach this sum; in (0, 1].
        top_k: draw only from this many most likely tokens; 0 or -1 means all, 1 is greedy.
        min_p: drop tokens less likely than this times the most likely one; in [0, 1].
        repetition_penalty: for each token of the prompt or the output, divides its logit if that is positive
            and multiplies it otherwise; more than 0, 1 changes nothing.
        frequency_penalty: subtracted from a token's logit for each time it is in the output; in [-2, 2].
        presence_penalty: subtracted once from the logit of each token of the output; in [-2, 2].
        seed: makes the request's random numbers repeatable, whatever else is in the batch. None or -1: drawn
            with the engine's.
        max_tokens: most tokens to generate; None means up to ``max_model_len``.
        ignore_eos: go on after the model's end token.
        stop_token_ids: further tokens that end the output; included in ``token_ids``, not in ``text``.
        min_tokens: before there are so many, neither the model's end token (unless ``ignore_eos``) nor one of
            ``stop_token_ids`` can be chosen; at most ``max_tokens``.
        logit_bias: by token id, what is added to its logit; in [-100, 100].
        allowed_token_ids: only these can be chosen. None: all.
        bad_words: texts that are not generated: the last token of each is never chosen after its others.
            Spelt with and without a space before it.
        stop: a text, or several, that end the output when they appear in it; the output's ``stop_reason``
            says which. The text ends before it, ``token_ids`` with the token that completed it. Of several
            the one that ends first counts, and of those that end together the longest. One that ends within
            the first ``min_tokens`` tokens does not count. Needs ``detokenize``.
        include_stop_str_in_output: the text includes what ended it: the stop string, or the token (unless
            that is special, and skipped).
        detokenize: False gives no text, neither in outputs nor in log probabilities.
        skip_special_tokens: special tokens give no text.
        spaces_between_special_tokens: False leaves out what the tokenizer's decoder puts between special
            tokens that follow each other. Byte-level tokenizers put nothing there.
        truncate_prompt_tokens: keep only this many tokens of the prompt, the last ones; at most
            ``max_model_len``. -1: as many as leave room for one new token. None: refuse what is too long.
        output_kind: what ``step()`` and ``start_stream()`` report; see :class:`RequestOutputKind`.
            ``generate()`` returns whole outputs always, and ``stream()`` yields new text, or with
            ``FINAL_ONLY`` all of it at the end.
        logprobs: report the log probability of each chosen token and of this many most likely ones. -1: of
            all tokens.
        prompt_logprobs: the same for each prompt token but the first.
        structured_outputs: what the text must look like: :class:`StructuredOutputsParams`, or a dict of its
            fields. The output ends with ``finish_reason="stop"`` as soon as nothing may follow, also before
            ``min_tokens``. When ``max_tokens`` come first it ends with ``"length"`` and is not complete.

    As in vLLM the logits are changed by structured_outputs, allowed_token_ids, bad_words, min_tokens and
    logit_bias, then by the penalties in the order above; then come temperature, min_p, top_k, top_p. The
    history is all of the prompt, cached or not, and the request's own output. Log probabilities are those of
    the raw logits.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range, or the field is not supported
            yet; the message names the field.
    """

    def __init__(
        self,
        n: int = 1,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        seed: int | None = None,
        max_tokens: int | None = 16,
        ignore_eos: bool = False,
        stop_token_ids: Sequence[int] | None = None,
        min_tokens: int = 0,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        bad_words: Sequence[str] | None = None,
        stop: str | Sequence[str] | None = None,
        include_stop_str_in_output: bool = False,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> None:
        for name in unsupported:
            if name in _NOT_HERE:
                raise InvalidRequestError(f"SamplingParams has no field {name!r}: {_NOT_HERE[name]}")
            raise InvalidRequestError(f"SamplingParams has no field {name!r}")
        for name, number in (
            ("temperature", temperature),
            ("top_p", top_p),
            ("min_p", min_p),
            ("repetition_penalty", repetition_penalty),
            ("frequency_penalty", frequency_penalty),
            ("presence_penalty", presence_penalty),
        ):
            _number(name, number)
        _integer("n", n)
        _integer("top_k", top_k)
        _integer("seed", seed, optional=True)
        _integer("max_tokens", max_tokens, optional=True)
        _integer("logprobs", logprobs, optional=True)
        _integer("prompt_logprobs", prompt_logprobs, optional=True)
        for name, count in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            if count is not None and not -1 <= count < 2**31:
                raise InvalidRequestError(
                    f"{name} must be between 0 and the number of tokens in the vocabulary, or -1 for all of "
                    f"them, got {count}"
                )
        for name, flag in (
            ("ignore_eos", ignore_eos),
            ("include_stop_str_in_output", include_stop_str_in_output),
            ("detokenize", detokenize),
            ("skip_special_tokens", skip_special_tokens),
            ("spaces_between_special_tokens", spaces_between_special_tokens),
        ):
            if not isinstance(flag, bool):
                raise InvalidRequestError(f"{name} must be True or False, got {shown(flag)}")
        _integer("truncate_prompt_tokens", truncate_prompt_tokens, optional=True)
        if truncate_prompt_tokens is not None and not (
            truncate_prompt_tokens == -1 or truncate_prompt_tokens >= 1
        ):
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at least 1, or -1, got {truncate_prompt_tokens}"
            )
        _integer("min_tokens", min_tokens)
        if allowed_token_ids is not None and not _ids("allowed_token_ids", allowed_token_ids):
            raise InvalidRequestError("allowed_token_ids must not be empty; None allows all")

        self.n = n
        self.temperature = float(temperature)
        self.top_p = float(top_p)
        self.top_k = top_k
        self.min_p = float(min_p)
        self.repetition_penalty = float(repetition_penalty)
        self.frequency_penalty = float(frequency_penalty)
        self.presence_penalty = float(presence_penalty)
        self.seed = None if seed == -1 else seed  # as in vLLM
        self.max_tokens = max_tokens
        self.ignore_eos = ignore_eos
        self.stop_token_ids = [] if stop_token_ids is None else _ids("stop_token_ids", stop_token_ids)
        self.min_tokens = min_tokens
        self.logit_bias = None if logit_bias is None else _biases(logit_bias)
        self.allowed_token_ids = (
            None if allowed_token_ids is None else _ids("allowed_token_ids", allowed_token_ids)
        )
        self.bad_words = [] if bad_words is None else _words(bad_words)
        self.stop = [] if stop is None else _stops(stop)
        if self.stop and not detokenize:
            raise InvalidRequestError("stop needs text, so detokenize must be True; or use stop_token_ids")
        self.include_stop_str_in_output = include_stop_str_in_output
        self.detokenize = detokenize
        self.skip_special_tokens = skip_special_tokens
        self.spaces_between_special_tokens = spaces_between_special_tokens
        self.truncate_prompt_tokens = truncate_prompt_tokens
        self.output_kind = _output_kind(output_kind)
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.structured_outputs = _structure(structured_outputs)
        # The ranges; those that depend on the vocabulary are checked with the request.
        self.to_core().validate(2**31 - 1)

    def __repr__(self) -> str:
        return "SamplingParams(" + ", ".join(f"{k}={v!r}" for k, v in vars(self).items()) + ")"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and vars(self) == vars(other)

    def checked_copy(self) -> SamplingParams:
        """One that later changes of this do not reach. What was assigned is checked like arguments."""
        return SamplingParams(**vars(self))

    def to_core(
        self, bad_words: Sequence[Sequence[int]] = (), vocab_size: int = 2**31 - 1
    ) -> _core.SamplingParams:
        """The same for the C++ core, which knows tokens only: `bad_words` as ids."""
        core = _core.SamplingParams()
        for name, value in vars(self).items():
            if name not in ("logit_bias", "allowed_token_ids", "bad_words", *_PYTHONS_OWN):
                setattr(core, name, value)
        if self.logprobs == -1:
            core.logprobs = vocab_size
        if self.prompt_logprobs == -1:
            core.prompt_logprobs = vocab_size
        core.logit_bias = list((self.logit_bias or {}).items())
        core.allowed_token_ids = self.allowed_token_ids or []
        core.bad_words = [list(word) for word in bad_words]
        return core
