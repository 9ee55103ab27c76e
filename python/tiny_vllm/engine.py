"""The engine as Python sees it: text in, text out, around the C++ core that turns ids into ids."""

from __future__ import annotations

import inspect
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tiny_vllm import _core
from tiny_vllm.config import EngineConfig
from tiny_vllm.detokenizer import Detokenizer
from tiny_vllm.errors import Error, InvalidRequestError, ModelLoadError
from tiny_vllm.model_files import resolve_model
from tiny_vllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tiny_vllm.sampling_params import SamplingParams
from tiny_vllm.tokenizer import Tokenizer, load_generation_config

# Text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
Progress = Callable[[int, int], None]  # called with (done, in all)


class _Request:
    """What Python keeps of an unfinished request: its growing output, and who waits for it."""

    def __init__(
        self, output: RequestOutput, params: SamplingParams, tokenizer: Tokenizer | None, owned: bool
    ) -> None:
        self.output = output
        self.params = params
        self.tokenizer = tokenizer
        self.owned = owned  # by generate() or stream(), not to be reported by step()
        self.detokenizers = [
            Detokenizer(tokenizer, output.prompt_token_ids) if tokenizer is not None else None
            for _ in range(params.n)
        ]

    def apply(self, step: _core.StepOutput) -> None:
        """Adds what one step said about one of the n sequences."""
        completion = self.output.outputs[step.index]
        now = time.monotonic()
        metrics = self.output.metrics
        assert metrics is not None
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            self.output.num_cached_tokens = step.num_cached_tokens
        if (
            step.index == 0
            and self.params.prompt_logprobs is not None
            and self.output.prompt_logprobs is None
        ):
            self.output.prompt_logprobs = [
                None,
                *(self._logprob_dict(entry) for entry in step.prompt_logprobs),
            ]

        detokenizer = self.detokenizers[step.index]
        if step.token >= 0:
            completion.token_ids.append(step.token)
            if self.params.logprobs is not None:
                assert completion.logprobs is not None
                assert completion.cumulative_logprob is not None
                completion.logprobs.append(self._logprob_dict(step.logprobs))
                completion.cumulative_logprob += step.logprobs[0].logprob
            if detokenizer is not None and step.finish_reason != "stop":  # the token that stops is not shown
                completion.text += detokenizer.add([step.token])
        if step.finish_reason is not None:
            if detokenizer is not None:
                completion.text += detokenizer.finish()
            completion.finish_reason = step.finish_reason
            completion.stop_reason = step.error or step.stop_token
            if all(c.finished() for c in self.output.outputs):
                self.output.finished = True
                metrics.finished_time = now

    def _logprob_dict(self, entries: Sequence[_core.TokenLogprob]) -> dict[int, Logprob]:
        if self.tokenizer is None:
            return {e.token: Logprob(e.logprob, e.rank) for e in entries}
        text, raw = self.tokenizer.token_text, self.tokenizer.token_bytes
        return {e.token: Logprob(e.logprob, e.rank, text(e.token), raw(e.token)) for e in entries}

    def snapshot(self) -> RequestOutput:
        """A copy that later steps do not change."""
        copies = [
            replace(c, token_ids=list(c.token_ids), logprobs=None if c.logprobs is None else list(c.logprobs))
            for c in self.output.outputs
        ]
        assert self.output.metrics is not None
        return replace(self.output, outputs=copies, metrics=replace(self.output.metrics))


class Engine:
    """Runs one model.

    Args:
        model: a folder in Hugging Face's layout, a ``.gguf`` file, or a Hub id; None takes the bundled small
            model.
        revision: branch, tag or commit of a Hub id.
        hf_token: access token for the Hub; default: the one that ``huggingface_hub`` finds.
        progress: called with (bytes done, bytes in all) while weights load.
        **options: fields of :class:`tiny_vllm.EngineConfig`.

    All methods may be called from several threads: whoever waits for tokens runs the next step for everybody.

    Raises:
        ModelLoadError: the model cannot be used; says which file and tensor.
        InvalidRequestError: an option is out of range.
        OutOfMemoryError: says how much was wanted and which option to lower.
        DeviceError: the device cannot be used; says why.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        hf_token: str | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        unknown = sorted(options.keys() - {f.name for f in fields(EngineConfig)})
        if unknown:
            raise TypeError(f"Engine() has no option {', '.join(map(repr, unknown))}")
        self.config = EngineConfig(**options)
        self.model_folder = resolve_model(model, revision=revision, token=hf_token)
        config_file = self.model_folder / "config.json"
        if not config_file.exists():
            raise ModelLoadError(f"{self.model_folder} is not a model folder: it has no config.json")
        self.tokenizer = (
            Tokenizer.from_folder(self.model_folder) if _has_tokenizer(self.model_folder) else None
        )
        self._generation_config = load_generation_config(self.model_folder, self.tokenizer)
        try:
            config_json = config_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{config_file}: cannot be read: {error}") from None
        self._core = _core.Engine(
            config_json, str(config_file), str(self.model_folder), self._core_options(), progress
        )
        for note in self._core.info()["notes"]:
            warnings.warn(note, stacklevel=2)
        self._requests: dict[str, _Request] = {}
        self._inbox: list[_core.StepOutput] = []
        self._lock = threading.RLock()
        self._turn = _Turn()
        self._next_id = 0

    def _core_options(self) -> _core.EngineOptions:
        c = self.config
        options = _core.EngineOptions()
        options.device = c.device
        options.dtype = "bfloat16" if c.dtype == "auto" else c.dtype
        options.dummy_weights = c.load_format == "dummy"
        options.eos_token_ids = [i for i in self._generation_config.eos_token_ids if i < 2**31]
        options.max_model_len = c.max_model_len or 0
        options.kv_cache_memory_bytes = c.kv_cache_memory_bytes or 0
        options.num_threads = c.num_threads or 0
        if c.gpu_memory_utilization is None:
            options.memory_utilization = 0.9 if c.device == "cuda" else 0.5
        else:
            options.memory_utilization = c.gpu_memory_utilization
        for name in (
            "cpu_isa",
            "seed",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "scheduler",
            "enable_prefix_caching",
            "enable_chunked_prefill",
        ):
            setattr(options, name, getattr(c, name))
        return options

    # ---- the loop that everything else is made of ----------------------------------------------------------

    def add_request(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> None:
        """Queues a request; :meth:`step` reports it.

        Raises:
            InvalidRequestError: the id is in use, the prompt is empty or can never fit, or a parameter is out
                of range. Other requests are not disturbed.
        """
        self._add(request_id, prompt, sampling_params, owned=False)

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests of :meth:`add_request` that it moved on, with all they have."""
        with self._turn, self._lock:
            return [r.snapshot() for r in self._run_step() if not r.owned]

    def abort_request(self, request_id: str) -> None:
        """Ends a request and gives its memory back. Unknown and finished ids are ignored."""
        with self._turn, self._lock:
            self._core.abort_request(request_id)
            # What an interrupted step said about it must not reach a later request of the same name.
            self._inbox = [step for step in self._inbox if step.request_id != request_id]
            request = self._requests.pop(request_id, None)
            if request is not None:
                for completion in request.output.outputs:
                    completion.finish_reason = completion.finish_reason or "abort"
                request.output.finished = True

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has work to do."""
        return bool(self._requests)

    # ---- whole answers -------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Completes one or several prompts as one batch, and returns them in order when all are done.

        Args:
            prompts: text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, or a list of
                these.
            sampling_params: for all prompts, or one for each. Default: :meth:`default_sampling_params`.
            progress: called with (requests finished, requests in all).

        Raises:
            InvalidRequestError: none of the prompts can be run; the first reason is given. When only some
                cannot, the others run, and a refused one's output has ``finish_reason="error"`` and the
                message in ``stop_reason``.
        """
        if not isinstance(prompts, Iterable):
            raise InvalidRequestError(
                "prompts must be text, token ids, a dict with 'prompt' or 'prompt_token_ids', or a list of "
                f"these, got {type(prompts).__name__}"
            )
        batch: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        if isinstance(sampling_params, Sequence):
            if len(sampling_params) != len(batch):
                raise InvalidRequestError(
                    f"sampling_params has {len(sampling_params)} entries for {len(batch)} prompts; "
                    "give one, or one each"
                )
            params = list(sampling_params)
        else:
            params = [sampling_params or self.default_sampling_params()] * len(batch)

        outputs: list[RequestOutput] = []
        errors: list[InvalidRequestError] = []
        try:
            for prompt, p in zip(batch, params, strict=True):
                request_id = self._new_id()
                try:
                    outputs.append(self._add(request_id, prompt, p, owned=True).output)
                except InvalidRequestError as error:
                    errors.append(error)
                    outputs.append(_refused(request_id, prompt, error))
            if errors and len(errors) == len(batch):
                raise errors[0]
            reported = -1
            while (done := sum(o.finished for o in outputs)) < len(outputs):
                if progress is not None and done != reported:
                    progress(done, len(outputs))
                    reported = done
                with self._turn, self._lock:
                    if not all(o.finished for o in outputs):
                        self._run_step()
            if progress is not None:
                progress(len(outputs), len(outputs))
        except BaseException:
            # Ctrl-C, a callback that raises: the engine stays usable, its blocks come back.
            for output in outputs:
                if not output.finished:
                    self.abort_request(output.request_id)
            raise
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several as one batch. The model's own chat template makes the prompts.

        Raises:
            InvalidRequestError: as :meth:`generate`; the model has no chat template, or messages are
                malformed.
        """
        _require_list_of_messages(messages)
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [self._chat_prompt(conversation, add_generation_prompt) for conversation in conversations]
        return self.generate(prompts, sampling_params, progress=progress)

    # ---- text as it comes ----------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Yields the pieces of the answer to a prompt or a conversation as they are generated.

        Dropping the iterator aborts the request. With n > 1 use :meth:`step`, which says whose piece it is.

        Raises:
            InvalidRequestError: at the call, not at the first piece.
            Error: in the middle, when the output ends with ``finish_reason="error"``.
        """
        params = sampling_params or self.default_sampling_params()
        if params.n != 1:
            raise InvalidRequestError("n must be 1 for stream(); use add_request() and step() for more")
        sent = 0
        request = self.start_stream(prompt, params)

        def pieces() -> Iterator[str]:
            nonlocal sent
            for output in request:
                completion = output.outputs[0]
                if len(completion.text) > sent:
                    piece, sent = completion.text[sent:], len(completion.text)
                    yield piece
                if completion.finish_reason == "error":
                    raise Error(str(completion.stop_reason))

        return pieces()

    def start_stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Like :meth:`stream`, but yields the growing :class:`RequestOutput` after each step of it."""
        if isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            prompt = self._chat_prompt(prompt, add_generation_prompt=True)  # type: ignore[arg-type]
        request_id = self._new_id()
        request = self._add(request_id, prompt, sampling_params, owned=True)  # type: ignore[arg-type]

        def outputs() -> Iterator[RequestOutput]:
            seen = 0
            try:
                while not request.output.finished:
                    with self._turn, self._lock:
                        if not request.output.finished:
                            self._run_step()
                    length = sum(len(c.token_ids) for c in request.output.outputs)
                    if length > seen or request.output.finished:
                        seen = length
                        yield request.snapshot()
            finally:
                if not request.output.finished:
                    self.abort_request(request_id)

        return _Stream(outputs(), lambda: self.abort_request(request_id))

    # ---- what a person may want to know --------------------------------------------------------------------

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, vLLM's defaults elsewhere."""
        g = self._generation_config
        wanted: dict[str, Any] = {
            "temperature": g.temperature,
            "top_p": g.top_p,
            "top_k": g.top_k,
            "min_p": g.min_p,
        }
        return SamplingParams(**{name: value for name, value in wanted.items() if value is not None})

    def metrics(self) -> dict[str, int | float]:
        """Counters since the start, KV cache use and queue lengths. Seconds and bytes are totals."""
        with self._turn, self._lock:
            return self._core.metrics()

    def info(self) -> dict[str, Any]:
        """What does not change: device, model, sizes in bytes and tokens."""
        return self._core.info()

    # ---- inside --------------------------------------------------------------------------------------------

    def _run_step(self) -> list[_Request]:
        """One step of the core; returns the requests it moved on. The caller holds the lock."""
        self._core.step(self._inbox)
        moved: dict[str, _Request] = {}
        while self._inbox:
            step = self._inbox.pop(0)
            request = self._requests.get(step.request_id)
            if request is None:
                continue  # aborted since
            request.apply(step)
            moved[step.request_id] = request
            if request.output.finished:
                self._requests.pop(step.request_id, None)
        return list(moved.values())

    def _new_id(self) -> str:
        with self._lock:
            while True:
                self._next_id += 1
                request_id = f"tiny-vllm-{self._next_id}"
                if request_id not in self._requests:
                    return request_id

    def _add(self, request_id: str, prompt: Prompt, params: SamplingParams | None, owned: bool) -> _Request:
        if not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id must be a string, got {request_id!r}")
        params = params or self.default_sampling_params()
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        text, ids = self._tokens_of(prompt)
        completions = [
            CompletionOutput(
                index=i,
                logprobs=None if params.logprobs is None else [],
                cumulative_logprob=None if params.logprobs is None else 0.0,
            )
            for i in range(min(params.n, self.config.max_num_seqs))  # a larger n is refused below
        ]
        output = RequestOutput(
            request_id,
            text,
            ids,
            completions,
            finished=False,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
        )
        with self._turn, self._lock:
            self._core.add_request(request_id, ids, params.to_core())
            request = _Request(output, params, self.tokenizer, owned)
            self._requests[request_id] = request
        return request

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text (None for ids) and token ids of a prompt."""
        if isinstance(prompt, Mapping):
            unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
            if unknown or not prompt:
                raise InvalidRequestError(
                    f"a prompt dict has 'prompt' or 'prompt_token_ids', got {sorted(prompt)}"
                )
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), self._tokens_of(prompt["prompt_token_ids"])[1]
            return self._tokens_of(prompt["prompt"])
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError(
                    f"{self.model_folder} has no tokenizer; give the prompt as token ids"
                )
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise InvalidRequestError(
                f"prompt must be text or a list of token ids, got {type(prompt).__name__}"
            )
        ids: list[Any] = list(prompt)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not -(2**31) <= token < 2**31:
                raise InvalidRequestError(
                    f"prompt token ids must be integers of the vocabulary, got {token!r}"
                )
        return None, ids

    def _chat_prompt(self, messages: Sequence[Message], add_generation_prompt: bool) -> dict[str, Any]:
        _require_list_of_messages(messages)
        if self.tokenizer is None:
            raise InvalidRequestError(f"{self.model_folder} has no tokenizer, so there is no chat template")
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=add_generation_prompt)
        # The template writes the begin token itself; encode() must not add a second one.
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}


class _Turn:
    """Goes around the engine's lock. A loop of steps would take the lock back before anybody else wakes up;
    with this it pauses for a moment when others are waiting.

    The lock itself stays the standard library's: Ctrl-C cannot come between its `__enter__` and the block it
    guards.
    """

    def __init__(self) -> None:
        self._users: list[None] = []  # whoever holds the lock or waits for it; append and pop are atomic

    def __enter__(self) -> None:
        self._users.append(None)

    def __exit__(self, *error: object) -> None:
        self._users.pop()
        if self._users:
            time.sleep(0.0002)


class _Stream(Iterator[RequestOutput]):
    """An iterator that aborts its request when it is dropped, even before the first piece."""

    def __init__(self, inner: Iterator[RequestOutput], abort: Callable[[], None]) -> None:
        self._inner = inner
        self._abort = abort
        self._started = False

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> RequestOutput:
        self._started = True
        return next(self._inner)

    def close(self) -> None:
        """Aborts the request if it is still running."""
        self._inner.close()  # type: ignore[attr-defined]
        if not self._started:
            self._abort()

    def __del__(self) -> None:
        if not self._started:  # a generator that never ran does not run its `finally` either
            self._abort()


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))


def _is_single(prompts: object) -> bool:
    """Whether this is one prompt: text, a dict, or a list of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)


def _require_list_of_messages(messages: object) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            'messages must be a list like [{"role": "user", "content": "Hello"}], or a list of such lists, '
            f"got {type(messages).__name__}"
        )


def _refused(request_id: str, prompt: Prompt, error: InvalidRequestError) -> RequestOutput:
    completion = CompletionOutput(index=0, finish_reason="error", stop_reason=str(error))
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(request_id, text, [], [completion], finished=True)


# help(Engine) lists the options although they are taken as keywords.
Engine.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *(p for p in inspect.signature(Engine.__init__).parameters.values() if p.kind is not p.VAR_KEYWORD),
        *(
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in fields(EngineConfig)
        ),
    ]
)
