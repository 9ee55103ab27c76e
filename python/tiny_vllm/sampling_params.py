"""How the tokens of a request are chosen. Names, defaults and meaning are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiny_vllm import _core
from tiny_vllm.errors import InvalidRequestError, shown

_NOT_YET = (
    "stop",
    "include_stop_str_in_output",
    "bad_words",
    "min_tokens",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "truncate_prompt_tokens",
    "output_kind",
    "logits_processors",
    "structured_outputs",
    "guided_decoding",
    "extra_args",
)


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
        logprobs: report the log probability of each chosen token and of this many most likely ones.
        prompt_logprobs: the same for each prompt token but the first.

    As in vLLM the penalties come first, in the order above, then temperature, min_p, top_k, top_p. The
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
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **unsupported: Any,
    ) -> None:
        for name in unsupported:
            if name in _NOT_YET:
                raise InvalidRequestError(f"{name} is not supported yet")
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
            if count is not None and not 0 <= count < 2**31:
                raise InvalidRequestError(
                    f"{name} must be between 0 and the number of tokens in the vocabulary, got {count}"
                )
        if not isinstance(ignore_eos, bool):
            raise InvalidRequestError(f"ignore_eos must be True or False, got {shown(ignore_eos)}")
        if stop_token_ids is None:
            stop_token_ids = ()
        if isinstance(stop_token_ids, (str, bytes, Mapping)) or not isinstance(stop_token_ids, Iterable):
            raise InvalidRequestError(
                f"stop_token_ids must be a list of integers, got {shown(stop_token_ids)}"
            )
        ids = list(stop_token_ids)
        for token in ids:
            _integer("stop_token_ids", token)
            if not 0 <= token < 2**31:
                raise InvalidRequestError(f"stop_token_ids must be in the vocabulary, got {token}")

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
        self.stop_token_ids = ids
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        # The ranges; those that depend on the vocabulary are checked with the request.
        self.to_core().validate(2**31 - 1)

    def __repr__(self) -> str:
        return "SamplingParams(" + ", ".join(f"{k}={v!r}" for k, v in vars(self).items()) + ")"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and vars(self) == vars(other)

    def checked_copy(self) -> SamplingParams:
        """One that later changes of this do not reach. What was assigned is checked like arguments."""
        return SamplingParams(**vars(self))

    def to_core(self) -> _core.SamplingParams:
        """The same for the C++ core."""
        core = _core.SamplingParams()
        for name, value in vars(self).items():
            setattr(core, name, value)
        return core
