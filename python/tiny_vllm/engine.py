"""The engine as Python sees it: text in, text out, around the C++ core that turns ids into ids."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tiny_vllm import _core
from tiny_vllm.config import EngineConfig
from tiny_vllm.cuda_libraries import find_cuda_libraries
from tiny_vllm.errors import InvalidRequestError, ModelLoadError, shown
from tiny_vllm.events import Events
from tiny_vllm.model_files import read_config_json, resolve_model
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.prompts import Message, Prompt, Prompts, is_single, require_list_of_messages
from tiny_vllm.requests import Owner, OwnerRef, Request, Stream, TextStream, checked_id, refused
from tiny_vllm.sampling_params import RequestOutputKind, SamplingParams
from tiny_vllm.structured_outputs import Guide, Guides
from tiny_vllm.tokenizer import Tokenizer, load_generation_config
from tiny_vllm.turns import Turns

Progress = Callable[[int, int], None]  # called with (done, in all)


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
    Ctrl-C may come at any moment: the call that it ends takes its own requests along, and no other request
    loses a token. After os.fork(), a child goes on with its copy, unless another thread was inside a call.
    A process that ends waits for the step that a daemon thread is in, and no further one begins.

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
        if not (model is None or isinstance(model, (str, Path))):
            raise ModelLoadError(
                f"model must be a folder, a .gguf file, a Hub id or None, got {type(model).__name__}"
            )
        _require_callable(progress)
        self.config = EngineConfig(**options)
        try:
            self.model_folder = resolve_model(model, revision=revision, token=hf_token)
        except OSError as error:  # a name that the system refuses to look up
            raise ModelLoadError(f"{shown(str(model))}: cannot be read: {error.strerror}") from None
        config_json = read_config_json(self.model_folder)
        self.tokenizer = (
            Tokenizer.from_folder(self.model_folder) if _has_tokenizer(self.model_folder) else None
        )
        self._generation_config = load_generation_config(self.model_folder, self.tokenizer)
        source = str(self.model_folder / "config.json")
        find_cuda_libraries(self.config.device)
        self._turns = Turns()

        def report(done: int, total: int) -> None:
            self._turns.stop_if_exiting()
            if progress is not None:
                progress(done, total)

        self._core = self._turns.call(
            lambda: _core.Engine(config_json, source, str(self.model_folder), self._core_options(), report)
        )
        info = self._core.info()
        for note in info["notes"]:
            warnings.warn(note, stacklevel=2)
        self._max_num_seqs: int = info["max_num_seqs"]
        self._vocab_size: int = info["vocab_size"]
        self._prompts = Prompts(
            self.tokenizer, self.model_folder, info["max_total_len"], info["max_model_len"]
        )
        self._guides = Guides(
            self.tokenizer, self.model_folder, info["vocab_size"], self._generation_config.eos_token_ids
        )
        # The first four are changed by the core alone; cpp/bindings/bind_engine.cpp says what they are.
        self._requests: dict[str, Request] = {}
        self._watched: dict[str, Request] = {}
        self._moved: dict[str, Request] = {}
        self._ready: list[RequestOutput] = []
        self._dropped: list[OwnerRef] = []  # owners that are gone; their requests are still to be ended
        self._ids = itertools.count(1)

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
        options.max_num_seqs = c.max_num_seqs or 0  # 0: the device's default
        options.max_num_batched_tokens = c.max_num_batched_tokens or 0
        options.memory_utilization = c.gpu_memory_utilization
        for name in (
            "cpu_isa",
            "enforce_eager",
            "profile",
            "seed",
            "block_size",
            "scheduler",
            "scheduling_policy",
            "record_events",
            "enable_prefix_caching",
            "enable_chunked_prefill",
        ):
            setattr(options, name, getattr(c, name))
        return options

    # ---- the loop that everything else is made of ----------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
    ) -> None:
        """Queues a request; :meth:`step` reports it.

        With ``scheduling_policy="priority"`` requests with a smaller `priority` go first, and take the places
        of running ones with a larger number, which go on later. Among equals who came first goes first.
        (With ``scheduler="static"`` a batch runs to its end, and only the queue is in this order.)

        Raises:
            InvalidRequestError: the id is in use, the prompt is empty or can never fit, or a parameter is out
                of range. Other requests are not disturbed.

        Ctrl-C in the middle of it ends the request; if a second one stops that, :meth:`abort_request` does
        it.
        """
        self._add(checked_id(request_id), prompt, self._checked_params(sampling_params), None, priority)

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests of :meth:`add_request` that have moved on.

        Each with what its ``output_kind`` says, by default with all it has. Also those that somebody else's
        step moved on. Each end is reported once.
        """
        self._call(self._step_and_report)
        empty: list[RequestOutput] = []
        # From here to the caller there is no call, so neither Ctrl-C nor another thread can come in between.
        ready, self._ready = self._ready, empty
        return ready

    def _step_and_report(self) -> None:
        self._run_step()
        for request in tuple(self._moved.values()):
            only_the_end = request.params.output_kind is RequestOutputKind.FINAL_ONLY
            if only_the_end and not request.finished:
                continue
            count = len(request.received)
            output = request.output(count, request.reported)
            self._core.make_ready(self._moved, self._ready, request, output, count)

    def _run_step(self) -> None:
        self._attend_to_watched()  # after the last step, if Ctrl-C came before it was done with them
        self._core.step(self._requests, self._watched, self._moved)
        self._attend_to_watched()

    def _attend_to_watched(self) -> None:
        """What concerns text, of which the core knows nothing.

        Ends the sequences whose text has come to a stop string, or to the end of its grammar, and says which
        tokens may come next where a grammar guides.
        """
        for request in tuple(self._watched.values()):
            for index, failed in request.stopped():
                self._core.stop_sequence(self._requests, self._watched, request, index, failed)
            request.guide_with(functools.partial(self._core.allow_tokens, self._requests, request))

    def abort_request(self, request_id: str) -> None:
        """Ends a request and gives its memory back. Unknown and finished ids are ignored."""
        self._call(self._abort, checked_id(request_id))

    def _abort(self, request_id: str) -> None:
        self._core.abort_request(self._requests, self._watched, self._moved, self._ready, request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has work to do, or an end to report."""
        if self._dropped:
            self._call(self._end_dropped)
        return bool(self._requests or self._moved or self._ready)

    # ---- whole answers -------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Completes one or several prompts as one batch, and returns them in order when all are done.

        Args:
            prompts: text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, or a list of
                these.
            sampling_params: for all prompts, or one for each. Default: :meth:`default_sampling_params`.
            priority: for all prompts, or one for each; see :meth:`add_request`.
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
        _require_callable(progress)
        batch: list[Any] = [prompts] if is_single(prompts) else list(prompts)
        params: list[SamplingParams]
        if isinstance(sampling_params, Sequence) and not _is_text(sampling_params):
            if len(sampling_params) != len(batch):
                raise InvalidRequestError(
                    f"sampling_params has {len(sampling_params)} entries for {len(batch)} prompts; "
                    "give one, or one each"
                )
            params = [_checked_params(p, f"sampling_params[{i}]") for i, p in enumerate(sampling_params)]
        else:
            params = [self._checked_params(sampling_params)] * len(batch)

        priorities = _one_each(priority, len(batch))
        owner = Owner(self._dropped)
        outputs: list[Any] = [None] * len(batch)
        running: dict[int, Request] = {}
        errors: list[InvalidRequestError] = []
        reported = -1
        try:
            for i, prompt in enumerate(batch):
                request_id = self._new_id()
                try:
                    running[i] = self._add(request_id, prompt, params[i], owner, priorities[i])
                except InvalidRequestError as error:
                    errors.append(error)
                    outputs[i] = refused(request_id, prompt, params[i], self._max_num_seqs, error)
            if errors and len(errors) == len(batch):
                raise errors[0]
            while True:
                for i in [i for i, request in running.items() if request.finished]:
                    outputs[i] = running.pop(i).output()
                done = len(batch) - len(running)
                if progress is not None and done != reported:
                    reported = done
                    progress(done, len(batch))
                if not running:
                    return outputs
                self._step_if(lambda: not any(request.finished for request in running.values()))
                for request in running.values():
                    request.catch_up()
        except BaseException:
            # Ctrl-C, a callback that raises: the engine stays usable, its blocks come back.
            self._call(self._end, owner.ref)
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        priority: int | Sequence[int] = 0,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several as one batch. The model's own chat template makes the prompts.

        Raises:
            InvalidRequestError: as :meth:`generate`; the model has no chat template, or messages are
                malformed.
        """
        require_list_of_messages(messages)
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        is_cut = _truncates(sampling_params)
        prompts = [self._prompts.read_chat(c, add_generation_prompt, is_cut) for c in conversations]
        return self.generate(prompts, sampling_params, priority=priority, progress=progress)

    # ---- text as it comes ----------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Iterator[str]:
        """Yields the pieces of the answer to a prompt or a conversation as they are generated.

        Dropping the iterator aborts the request. With n > 1 use :meth:`step`, which says whose piece it is.

        Raises:
            InvalidRequestError: at the call, not at the first piece.
            Error: in the middle, when the output ends with ``finish_reason="error"``.
        """
        params = self._checked_params(sampling_params)
        if params.n != 1:
            raise InvalidRequestError("n must be 1 for stream(); use add_request() and step() for more")
        if params.output_kind is RequestOutputKind.DELTA:
            params.output_kind = RequestOutputKind.CUMULATIVE  # TextStream finds out what is new itself
        return TextStream(self._start_stream(prompt, params, priority))

    def start_stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Iterator[RequestOutput]:
        """Like :meth:`stream`, but yields the growing :class:`RequestOutput` whenever it has grown.

        Or what is new, or only the end: ``output_kind`` says which.
        """
        return self._start_stream(prompt, self._checked_params(sampling_params), priority)

    def _start_stream(self, prompt: Any, params: SamplingParams, priority: int) -> Stream:
        if isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            prompt = self._prompts.read_chat(prompt, True, _truncates(params))
        stream = Stream(self._dropped, self._step_if, lambda owner: self._call(self._end, owner))
        try:
            stream.request = self._add(self._new_id(), prompt, params, stream, priority)
        except BaseException:
            stream.close()
            raise
        return stream

    # ---- what a person may want to know --------------------------------------------------------------------

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, vLLM's defaults elsewhere."""
        g = self._generation_config
        wanted: dict[str, Any] = {
            "temperature": g.temperature,
            "top_p": g.top_p,
            "top_k": g.top_k,
            "min_p": g.min_p,
            "repetition_penalty": g.repetition_penalty,
        }
        return SamplingParams(**{name: value for name, value in wanted.items() if value is not None})

    def metrics(self) -> dict[str, int | float]:
        """Counters since the start, KV cache use and queue lengths. Seconds and bytes are totals."""
        metrics: dict[str, int | float] = self._call(self._core.metrics)
        return metrics

    def info(self) -> dict[str, Any]:
        """What does not change: device, model, sizes in bytes and tokens."""
        return self._core.info()

    def events(self) -> Events:
        """With ``record_events=True``, what the scheduler did, step by step, up to now.

        It grows with each step by some 100 bytes and 12 for each running sequence, and nothing is forgotten.

        Raises:
            InvalidRequestError: the engine was made without ``record_events=True``.
        """
        if not self.config.record_events:
            raise InvalidRequestError("there are no events: make the engine with record_events=True")
        sequences, steps = self._call(self._core.events)
        about = self._core.info()
        engine = {"model": self.model_folder.name, "device": about["device"]}
        engine |= {
            n: getattr(self.config, n) for n in ("scheduler", "scheduling_policy", "enable_prefix_caching")
        }
        engine |= {n: about[n] for n in ("block_size", "num_blocks", "max_num_seqs")}
        engine |= {n: about[n] for n in ("max_num_batched_tokens", "max_model_len")}
        return Events(engine, sequences, steps, self.tokenizer)

    def take_profile(self) -> list[_core.KernelRecord]:
        """With ``profile=True``, the kernels that ran on the GPU since the last call, in order; else ``[]``.

        A record has the kernel's ``name``, the ``step`` and its ``tokens``, ``start_us`` and ``duration_us``,
        and the ``bytes`` and ``flops`` that it must move and do. :mod:`tiny_vllm.kernel_profile` makes a
        table and a timeline of them. The call empties the list. Until then the engine keeps every record, a
        hundred and more for each step, and memory fills: in a long run, take them now and then.
        """
        records: list[_core.KernelRecord] = self._call(self._core.take_profile)
        return records

    # ---- inside --------------------------------------------------------------------------------------------

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function while no other thread is in such a call."""

        def work() -> Any:
            self._end_dropped()
            return function(*arguments)

        return self._turns.call(work)

    def _step_if(self, wanted: Callable[[], bool]) -> None:
        """Runs one step for everybody, unless somebody else's step has brought what was wanted."""

        def step() -> None:
            if wanted():
                self._run_step()

        self._call(step)

    def _end(self, owner: OwnerRef) -> None:
        """Ends what is left of the owner's requests. An id may belong to somebody else by now."""
        for request_id in owner.request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.owner is owner:
                self._abort(request_id)

    def _end_one(self, request: Request) -> None:
        """Ends the request if it has not been reported. Its id may belong to somebody else by now."""
        if request in (self._requests.get(request.request_id), self._moved.get(request.request_id)):
            self._abort(request.request_id)

    def _end_dropped(self) -> None:
        for owner in tuple(self._dropped):
            self._end(owner)
            if owner in self._dropped:  # a signal handler may have called the engine
                self._dropped.remove(owner)

    def _new_id(self) -> str:
        while (request_id := f"tiny-vllm-{next(self._ids)}") in self._requests or request_id in self._moved:
            pass
        return request_id

    def _add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        owner: Owner | None,
        priority: object = 0,
    ) -> Request:
        _require_integer("priority", priority)
        text, ids = self._prompts.read(prompt, params.truncate_prompt_tokens)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                f"stop needs text, and {self.model_folder} has no tokenizer; use stop_token_ids"
            )
        guide = self._make_guide(params)
        request = Request(request_id, text, ids, params, self.tokenizer, owner.ref if owner else None, guide)
        if owner is not None:
            owner.request_ids.append(request_id)
        core_params = params.to_core(self._prompts.ids_of_words(params.bad_words), self._vocab_size)
        try:
            self._call(
                self._core.add_request,
                self._requests,
                self._watched,
                self._moved,
                self._ready,
                request,
                ids,
                core_params,
                priority,
                guide.allowed if guide is not None else b"",
            )
            return request
        except InvalidRequestError:
            raise
        except BaseException:
            self._call(self._end_one, request)
            raise

    def _make_guide(self, params: SamplingParams) -> Guide | None:
        """May take a while, with a large vocabulary or grammar, when it is asked for the first time."""
        return None if params.structured_outputs is None else self._guides.make(params.structured_outputs)

    def _checked_params(self, params: object) -> SamplingParams:
        """The default for None; else a copy of its own."""
        return self.default_sampling_params() if params is None else _checked_params(params)


def _require_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise InvalidRequestError(f"{name} must be an integer of 64 bits, got {shown(value)}")


def _one_each(priority: object, count: int) -> Sequence[Any]:
    if not isinstance(priority, Sequence) or _is_text(priority):
        return [priority] * count
    if len(priority) != count:
        raise InvalidRequestError(
            f"priority has {len(priority)} entries for {count} prompts; give one, or one each"
        )
    return priority


def _is_text(value: object) -> bool:
    return isinstance(value, (str, bytes, bytearray))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))


def _checked_params(params: object, name: str = "sampling_params") -> SamplingParams:
    """A copy that the caller cannot change any more."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"{name} must be SamplingParams, got {type(params).__name__}")
    return params.checked_copy()


def _truncates(params: object) -> bool:
    """Whether a prompt that is too long will be cut, for some of the prompts at least."""
    several = params if isinstance(params, Sequence) and not _is_text(params) else [params]
    return any(isinstance(p, SamplingParams) and p.truncate_prompt_tokens is not None for p in several)


def _require_callable(progress: object) -> None:
    if progress is not None and not callable(progress):
        raise InvalidRequestError(f"progress must be a function of two numbers, got {shown(progress)}")


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
