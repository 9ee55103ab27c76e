"""What a request gives back. Names and meaning are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """Log probability of one token under the raw logits."""

    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str | None = None  # part of a character shows as U+FFFD
    decoded_bytes: bytes | None = None  # what it really is


@dataclass
class CompletionOutput:
    """One of the n outputs of a request.

    ``text`` leaves out the token that ended the output; ``token_ids`` has it. ``logprobs`` has one dict a
    token: the chosen token and the most likely ones, by id.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None: still running
    stop_reason: int | str | None = None  # the entry of stop_token_ids that ended it, or the error's message

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of a request in seconds of ``time.monotonic()``; None: not yet, or it ended without a token."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """A request and what it has produced so far. The caller's own: it shares no list or dict with the engine.

    What was refused or failed before its first token has no ``prompt_logprobs`` and no ``num_cached_tokens``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first: nothing predicts it
    num_cached_tokens: int | None = None  # prompt tokens whose KV came from the prefix cache
    metrics: RequestMetrics | None = None
