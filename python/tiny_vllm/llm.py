"""vLLM's offline interface: what says ``from vllm import LLM`` runs with ``from tiny_vllm import LLM``.

All the work is :class:`tiny_vllm.Engine`'s, and new programs do better with that one: it streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiny_vllm.cache import byte_progress, count_progress
from tiny_vllm.engine import Engine
from tiny_vllm.errors import InvalidRequestError, shown
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.prompts import Message, Prompt
from tiny_vllm.sampling_params import SamplingParams
from tiny_vllm.tokenizer import Tokenizer

# Options of vLLM for what is not here, with the values that ask for nothing.
_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "quantization": (None,),
    "swap_space": (0, 4),  # 4 was the default, and is what its examples say
    "cpu_offload_gb": (0,),
    "trust_remote_code": (False, True),  # it allows, and there is nothing that would be allowed
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "skip_tokenizer_init": (False,),
    "kv_cache_dtype": ("auto",),
    "enable_lora": (False,),
    "disable_log_stats": (False, True),
    "disable_custom_all_reduce": (False, True),
}


class LLM:
    """A model that answers batches of prompts.

    Args:
        model: a folder, a ``.gguf`` file or a Hub id. (``None`` takes the bundled small model.)
        **options: vLLM's, as far as :class:`tiny_vllm.EngineConfig` has them, ``revision`` and ``hf_token``.

    Raises:
        InvalidRequestError: an option asks for what is not here, several GPUs for example; says which.
        ModelLoadError, OutOfMemoryError, DeviceError, TypeError: as :class:`tiny_vllm.Engine`.

    Of vLLM's methods there are generate(), chat(), get_tokenizer() and get_default_sampling_params(). There
    is no LoRA, and there are no tools and no beam search.

    A prompt of a batch that cannot be run does not end the call, as it does in vLLM: its output says why
    (see :meth:`tiny_vllm.Engine.generate`).
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        for name in [name for name in options if name in _ASKS_FOR_NOTHING]:
            value = options.pop(name)
            if value not in _ASKS_FOR_NOTHING[name]:
                raise InvalidRequestError(f"{name}={shown(value)} is not supported; leave it out")
        if options.get("dtype") == "float":
            options["dtype"] = "float32"
        with byte_progress("Loading weights") as progress:
            self.engine = Engine(model, progress=progress, **options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes the prompts as one batch; with `use_tqdm` a bar on standard error says how far it is."""
        return self._with_bar(
            use_tqdm,
            lambda progress: self.engine.generate(
                prompts, sampling_params, priority=0 if priority is None else priority, progress=progress
            ),
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several as one batch."""
        return self._with_bar(
            use_tqdm,
            lambda progress: self.engine.chat(
                messages, sampling_params, add_generation_prompt=add_generation_prompt, progress=progress
            ),
        )

    def get_tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for."""
        return self.engine.default_sampling_params()

    def _with_bar(self, wanted: object, run: Callable[[Any], list[RequestOutput]]) -> list[RequestOutput]:
        if not isinstance(wanted, bool):
            raise InvalidRequestError(f"use_tqdm must be True or False, got {shown(wanted)}")
        if not wanted:
            return run(None)
        with count_progress("Requests") as progress:
            return run(progress)
