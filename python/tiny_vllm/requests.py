"""What Python keeps of a request: what the core said about it, and who waits for it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tiny_vllm import _core
from tiny_vllm.detokenizer import Detokenizer
from tiny_vllm.errors import Error, InvalidRequestError, shown
from tiny_vllm.output_text import OutputText
from tiny_vllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tiny_vllm.sampling_params import RequestOutputKind, SamplingParams
from tiny_vllm.structured_outputs import Guide
from tiny_vllm.tokenizer import Tokenizer


class Owner:
    """Whoever waits for requests of its own: a call of generate(), or a stream."""

    def __init__(self, dropped: list[OwnerRef]) -> None:
        """When the owner is gone, its `ref` is in `dropped`: the engine ends what is left of its requests.

        That is how a dropped stream ends, and a generate() whose clean-up met a second Ctrl-C. The callback
        is a list's own method: unlike a `__del__` in Python, nothing can interrupt it.
        """
        self.request_ids: list[str] = []
        self.ref = OwnerRef(self, dropped.append)
        self.ref.request_ids = self.request_ids


class OwnerRef(weakref.ref[Owner]):
    request_ids: Sequence[str] = ()


class Request:
    """A request as the core knows it. The comment in cpp/bindings/bind_engine.cpp lists what the core sets.

    `received` only grows, and the core appends to it in the same call that ran the step. All else is worked
    out of it when somebody asks. So Ctrl-C can come at any moment: no token is lost or counted twice.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        owner: OwnerRef | None,
        guide: Guide | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.tokenizer = tokenizer
        self.owner = owner
        self.arrival_time = time.monotonic()
        self.received: list[_core.StepOutput | int | float] = []
        self.finished = False
        self.reported = 0
        self.guide = guide  # at the first token
        self.is_watched = bool(params.stop) or guide is not None
        self._guided: dict[
            int, int
        ] = {}  # by sequence: tokens it had when the core was told what may come next
        self._answer: _Answer | None = None

    def output(self, count: int | None = None, since: int | None = None) -> RequestOutput:
        """What the first `count` elements of `received` say, or all: the caller's own copy.

        With `since` and output_kind DELTA only what the elements from there on say. Asked in order, each call
        does the new part only.
        """
        answer = self._read(count)
        if since is not None and self.params.output_kind is RequestOutputKind.DELTA:
            output = answer.delta(since)
        else:
            output = answer.copy()
        self._answer = answer
        return output

    def catch_up(self) -> None:
        """Does the work of output() as far as it goes now, while the device is busy with the next step."""
        self._answer = self._read(None)

    def stopped(self) -> list[tuple[int, bool]]:
        """The sequences that go no further, and whether that is a failure.

        Their text has come to a stop string or to the end of what its grammar allows; or the grammar failed.
        """
        answer = self._read(None)
        stopped = answer.stopped()
        self._answer = answer
        return stopped

    def guide_with(self, allow_tokens: Callable[[int, int, bytes], object]) -> None:
        """Calls allow_tokens(sequence, its number of tokens, what may come next) where that is news."""
        if self.guide is None:
            return
        answer = self._read(None)
        news = [s for s in answer.guidance() if s[1] > self._guided.get(s[0], 0)]
        self._answer = answer
        for index, count, allowed in news:
            allow_tokens(index, count, allowed)
            self._guided[index] = count  # afterwards: twice does no harm, and never would

    def _read(self, count: int | None) -> _Answer:
        # It is taken while it changes, in one line without a call: nobody else can come in between.
        answer, self._answer = self._answer, None
        if answer is None or (count is not None and answer.num_applied > count):
            # The first call; or Ctrl-C broke off the last one; or somebody else is in it. Begin anew.
            answer = _Answer(self)
        for step in self.received[answer.num_applied : count]:
            answer.apply(step)
            answer.num_applied += 1
        return answer


class _Answer:
    """The outputs of a request, made from the steps' words one after the other."""

    def __init__(self, request: Request) -> None:
        self.num_applied = 0
        self._params = params = request.params
        self._tokenizer = tokenizer = request.tokenizer if params.detokenize else None
        self._completions = _empty_completions(params, params.n)
        self._metrics = RequestMetrics(arrival_time=request.arrival_time)
        self._output = RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            self._completions,
            finished=False,
            metrics=self._metrics,
        )
        self._texts = [
            _output_text(tokenizer, request) if tokenizer is not None else None for _ in range(params.n)
        ]
        self._guides = [request.guide.copy() for _ in range(params.n)] if request.guide is not None else []
        self._prompt_logprobs_at = 0  # the element of `received` that brought them
        # With DELTA, for each element: what its sequences had before, as (index, tokens, characters).
        self._before: list[list[tuple[int, int, int]]] = []

    def apply(self, step: _core.StepOutput | int | float) -> None:
        """Adds what one step said about one of the n sequences.

        An int: the next token of the first of them. A float: the request was aborted then.
        """
        if self._params.output_kind is RequestOutputKind.DELTA:
            self._remember(step)
        if isinstance(step, int):
            self._append(0, step)
            self._guide(self._completions[0], step)
            return
        if isinstance(step, float):
            if not self._output.finished:
                for completion in self._completions:
                    if not completion.finished():
                        self._finish(completion, "abort", None)
                self._output.finished = True
                self._metrics.finished_time = step
            return
        if step.token >= 0 and self._metrics.first_token_time is None:
            self._metrics.first_token_time = step.time
            self._output.num_cached_tokens = step.num_cached_tokens
        if (
            step.index == 0
            and self._params.prompt_logprobs is not None
            and self._output.prompt_logprobs is None
            and (step.token >= 0 or step.prompt_logprobs)  # a step that failed has none
        ):
            self._output.prompt_logprobs = [None, *map(self._logprob_dict, step.prompt_logprobs)]
            self._prompt_logprobs_at = self.num_applied
        is_last = step.finish_reason is not None
        completion = self._completions[step.index]
        if completion.finished():  # a stop string ended it, and the core had not been told yet
            return
        if step.token >= 0:
            is_shown = step.finish_reason != "stop" or self._params.include_stop_str_in_output
            self._append(step.index, step.token, is_shown)
            if completion.logprobs is not None:
                assert completion.cumulative_logprob is not None
                completion.logprobs.append(self._logprob_dict(step.logprobs))
                completion.cumulative_logprob += step.logprobs[0].logprob
            if not is_last or step.finish_reason == "length":  # it may be complete all the same
                self._guide(completion, step.token)
        if is_last and not completion.finished():
            self._finish(completion, step.finish_reason, step.error or step.stop_token)
        if completion.finished() and all(c.finished() for c in self._completions):
            self._output.finished = True
            self._metrics.finished_time = step.time

    def _append(self, index: int, token: int, is_shown: bool = True) -> None:
        completion, text = self._completions[index], self._texts[index]
        completion.token_ids.append(token)
        if text is not None and is_shown:
            text.add([token], look_for_stop=len(completion.token_ids) > self._params.min_tokens)
            self._show(completion, text)

    def _guide(self, completion: CompletionOutput, token: int) -> None:
        if not self._guides or completion.finished():
            return
        guide = self._guides[completion.index]
        guide.take(token)
        if guide.error:
            self._finish(completion, "error", guide.error)
        elif guide.is_complete:
            self._finish(completion, "stop", None)

    def guidance(self) -> list[tuple[int, int, bytes]]:
        """For each sequence that goes on: its index, its number of tokens, and which may come next."""
        going_on = [
            (c, guide) for c, guide in zip(self._completions, self._guides, strict=True) if not c.finished()
        ]
        return [(c.index, len(c.token_ids), guide.allowed) for c, guide in going_on]

    def _finish(self, completion: CompletionOutput, reason: str, stop_reason: int | str | None) -> None:
        completion.finish_reason = reason
        completion.stop_reason = stop_reason
        text = self._texts[completion.index]
        if text is not None:
            # The bytes that waited for a whole character may complete a stop string too.
            ended_by_itself = reason in ("stop", "length")
            text.finish(ended_by_itself and len(completion.token_ids) > self._params.min_tokens)
            self._show(completion, text)

    def _show(self, completion: CompletionOutput, text: OutputText) -> None:
        completion.text = text.text
        if text.stop is not None:
            completion.finish_reason = "stop"
            completion.stop_reason = text.stop

    def stopped(self) -> list[tuple[int, bool]]:
        by_text = {i for i, text in enumerate(self._texts) if text is not None and text.stop is not None}
        by_guide = {i for i, guide in enumerate(self._guides) if guide.is_complete or guide.error}
        return [(i, self._completions[i].finish_reason == "error") for i in sorted(by_text | by_guide)]

    def _remember(self, step: _core.StepOutput | int | float) -> None:
        if isinstance(step, float):
            changed = [c for c in self._completions if not c.finished()]
        else:
            changed = [self._completions[0 if isinstance(step, int) else step.index]]
        self._before.append([(c.index, len(c.token_ids), len(c.text)) for c in changed if not c.finished()])

    def _logprob_dict(self, entries: Sequence[_core.TokenLogprob]) -> dict[int, Logprob]:
        if self._tokenizer is None:
            return {e.token: Logprob(e.logprob, e.rank) for e in entries}
        text, raw = self._tokenizer.token_text, self._tokenizer.token_bytes
        return {e.token: Logprob(e.logprob, e.rank, text(e.token), raw(e.token)) for e in entries}

    def delta(self, since: int) -> RequestOutput:
        """Like copy(), but only what is new after `since` elements. Outputs without news are left out.

        `cumulative_logprob` is that of the whole output all the same, as in vLLM.
        """
        before: dict[int, tuple[int, int]] = {}
        for changes in self._before[since : self.num_applied]:
            for index, tokens, characters in changes:
                before.setdefault(index, (tokens, characters))
        output: RequestOutput = self._copy_frame()
        if since > self._prompt_logprobs_at:
            output.prompt_logprobs = None
        output.outputs = [_shallow_copy(c) for c in self._completions if c.index in before]
        for completion in output.outputs:
            tokens, characters = before[completion.index]
            completion.text = completion.text[characters:]
            completion.token_ids = completion.token_ids[tokens:]
            if completion.logprobs is not None:
                completion.logprobs = [dict(row) for row in completion.logprobs[tokens:]]
        return output

    def copy(self) -> RequestOutput:
        """One that shares nothing that can change: neither later steps nor the caller disturb the other."""
        output = self._copy_frame()
        output.outputs = [_shallow_copy(c) for c in self._completions]
        for completion in output.outputs:
            completion.token_ids = list(completion.token_ids)
            if completion.logprobs is not None:
                completion.logprobs = [dict(row) for row in completion.logprobs]
        return output

    def _copy_frame(self) -> RequestOutput:
        """All but the outputs."""
        output: RequestOutput = _shallow_copy(self._output)
        output.prompt_token_ids = list(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            output.prompt_logprobs = [None if row is None else dict(row) for row in output.prompt_logprobs]
        output.metrics = _shallow_copy(self._metrics)
        return output


class Stream(Owner, Iterator[RequestOutput]):
    """The growing output of one request. Ends the request when it is closed, dropped or interrupted.

    Several threads may read it; each output goes to one of them.
    """

    def __init__(
        self,
        dropped: list[OwnerRef],
        step_if: Callable[[Callable[[], bool]], None],
        end: Callable[[OwnerRef], None],
    ) -> None:
        """`step_if` runs one step for everybody when its argument still says so; `end` ends the requests."""
        super().__init__(dropped)
        self.request: Request | None = None
        self._step_if = step_if
        self._end = end
        self._seen = 0  # elements of request.received that somebody has got
        self._closed = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> RequestOutput:
        request = self.request
        if request is None:
            raise StopIteration
        only_the_end = request.params.output_kind is RequestOutputKind.FINAL_ONLY

        def nothing_new() -> bool:
            if request.finished or self._closed:
                return False
            return only_the_end or len(request.received) <= self._seen

        try:
            while not self._closed:
                finished = request.finished  # looked at first: what was received before is in the count
                count = len(request.received)
                # From here to the assignment there is no call, so no other thread takes the same.
                seen = self._seen
                if count > seen and (finished or not only_the_end):
                    self._seen = count
                    return request.output(count, seen)
                if finished:
                    break
                self._step_if(nothing_new)
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Ends the request if it is still running."""
        self._closed = True
        if self.request is None or not self.request.finished:
            self._end(self.ref)


class TextStream(Iterator[str]):
    """The text of a stream, in pieces. Not a generator, because Ctrl-C could come into its clean-up."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._sent = 0  # characters that somebody has got
        self._error = ""

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        try:
            while True:
                error, self._error = self._error, ""
                if error:
                    raise Error(error)
                completion = next(self._stream).outputs[0]
                if completion.finish_reason == "error":
                    self._error = str(completion.stop_reason)
                text = completion.text
                size = len(text)
                sent = self._sent  # from here to the assignment there is no call, as in Stream
                if size > sent:
                    self._sent = size
                    return text[sent:]
        except BaseException:
            self._stream.close()
            raise

    def close(self) -> None:
        """Ends the request if it is still running."""
        self._stream.close()


def checked_id(request_id: object) -> str:
    if not isinstance(request_id, str):
        raise InvalidRequestError(f"request_id must be a string, got {shown(request_id)}")
    try:
        request_id.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"request_id must be text, got half of a surrogate pair in {shown(request_id)}"
        ) from None
    return str(request_id)


def refused(
    request_id: str, prompt: object, params: SamplingParams, most: int, error: InvalidRequestError
) -> RequestOutput:
    """The output of a prompt that cannot be run: as one that ended before its first token.

    It has n completions; but one if n is above `most`, which alone is a reason to refuse it.
    """
    now = time.monotonic()
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    completions = _empty_completions(params, params.n if params.n <= most else 1)
    for completion in completions:
        completion.finish_reason = "error"
        completion.stop_reason = str(error)
    return RequestOutput(
        request_id,
        text if isinstance(text, str) else None,
        [],
        completions,
        finished=True,
        metrics=RequestMetrics(arrival_time=now, finished_time=now),
    )


def _output_text(tokenizer: Tokenizer, request: Request) -> OutputText:
    params = request.params
    detokenizer = Detokenizer(
        tokenizer,
        request.prompt_token_ids,
        params.skip_special_tokens,
        params.spaces_between_special_tokens,
    )
    return OutputText(detokenizer, params.stop, params.include_stop_str_in_output)


def _empty_completions(params: SamplingParams, n: int) -> list[CompletionOutput]:
    return [
        CompletionOutput(
            index=i,
            logprobs=None if params.logprobs is None else [],
            cumulative_logprob=None if params.logprobs is None else 0.0,
        )
        for i in range(n)
    ]


def _shallow_copy(value: Any) -> Any:
    copy = object.__new__(type(value))
    copy.__dict__.update(value.__dict__)
    return copy
