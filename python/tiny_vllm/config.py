"""Every option of the engine, once: name, default, meaning. The CLI, `Engine` and the docs derive from it."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass, field
from typing import Any

from tiny_vllm.errors import InvalidRequestError, shown


def _option(default: Any, doc: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"doc": doc, "choices": choices})


# Tokens and sequences of a step are counted in 32 bits, bytes in 64. The other two are far beyond any use.
_MOST = {
    "max_model_len": 2**31 - 1,
    "max_num_seqs": 2**31 - 1,
    "max_num_batched_tokens": 2**31 - 1,
    "block_size": 65536,
    "kv_cache_memory_bytes": 2**62,
    "num_threads": 1024,
}


@dataclass(frozen=True)
class EngineConfig:
    """Options of :class:`tiny_vllm.Engine`. Names are vLLM's where it has one. Unknown ones raise TypeError.

    Raises:
        InvalidRequestError: an option has the wrong type or is not one of its choices. Ranges that depend on
            the model or the machine are checked when the engine starts.
    """

    device: str = _option(
        "auto",
        "where to run; auto is a GPU if there is one, and CUDA_VISIBLE_DEVICES chooses which",
        ("auto", "cpu", "cuda"),
    )
    dtype: str = _option(
        "auto", "number format of weights and KV cache; auto is bfloat16", ("auto", "bfloat16", "float32")
    )
    load_format: str = _option(
        "auto",
        "where the weights come from: the model's files (auto), or random numbers (dummy)",
        ("auto", "dummy"),
    )
    max_model_len: int | None = _option(
        None, "most tokens of one request, prompt and output; default: the model's limit"
    )
    max_num_seqs: int | None = _option(
        None, "most requests that run at once; default: 256 on a GPU, 64 on a CPU"
    )
    max_num_batched_tokens: int | None = _option(
        None, "most tokens computed in one step; default: 8192 on a GPU, 512 on a CPU"
    )
    block_size: int = _option(16, "tokens in a block of the KV cache")
    kv_cache_memory_bytes: int | None = _option(
        None, "bytes of the KV cache; default: a share of the free memory"
    )
    gpu_memory_utilization: float | None = _option(
        None, "share of the device's free memory for the KV cache; default: 0.9 on a GPU, 0.5 on a CPU"
    )
    scheduler: str = _option("continuous", "how requests are batched", ("continuous", "static"))
    scheduling_policy: str = _option(
        "fcfs",
        "whose turn it is: who came first (fcfs), or whose request has the smaller priority number",
        ("fcfs", "priority"),
    )
    enable_prefix_caching: bool = _option(True, "reuse the KV cache of prompts that begin alike")
    enable_chunked_prefill: bool = _option(True, "cut long prompts into chunks that share steps with decodes")
    enforce_eager: bool = _option(
        False,
        "on a GPU, never record steps as CUDA graphs, nor start a step before the host has seen the last "
        "one's tokens; the CPU does neither, so it is always eager",
    )
    profile: bool = _option(
        False,
        "time every kernel on a GPU, which slows steps down; Engine.take_profile() returns the times, and "
        "`tiny-vllm bench --profile` shows them",
    )
    record_events: bool = _option(
        False, "note what the scheduler does in each step, for Engine.events() and traces"
    )
    num_threads: int | None = _option(None, "CPU threads; default: as many as this process may run on")
    cpu_isa: str = _option(
        "auto",
        "instruction set of the CPU kernels; auto takes the best this machine has",
        ("auto", "reference", "portable", "avx2", "avx512", "avx512_bf16", "amx", "neon"),
    )
    seed: int = _option(
        0,
        "draws the weights of load_format=dummy, and tokens of requests whose SamplingParams have no seed",
    )

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            choices = f.metadata["choices"]
            if choices and (not isinstance(value, str) or value not in choices):
                hint = _hint(f.name, value)
                raise InvalidRequestError(
                    f"{f.name} must be one of {', '.join(choices)}, got {shown(value)}{hint}"
                )
            kind = str(f.type)
            if value is None and "None" in kind:
                continue
            if kind.startswith("bool"):
                wanted, ok = "True or False", isinstance(value, bool)
            elif kind.startswith("int"):
                wanted, ok = "an integer", isinstance(value, int) and not isinstance(value, bool)
            elif kind.startswith("float"):
                wanted, ok = "a number", isinstance(value, (int, float)) and not isinstance(value, bool)
            else:
                wanted, ok = "a string", isinstance(value, str)
            if not ok:
                raise InvalidRequestError(f"{f.name} must be {wanted}, got {shown(value)}")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise InvalidRequestError(f"{name} must be in [1, {most}], got {shown(value)}")
        if not 0 <= self.seed < 2**63:
            raise InvalidRequestError(f"seed must be in [0, 2**63), got {shown(self.seed)}")


def _hint(option: str, value: object) -> str:
    if option == "device" and isinstance(value, str) and value.startswith("cuda:"):  # as PyTorch writes it
        return "; CUDA_VISIBLE_DEVICES chooses the GPU"
    if option == "dtype" and value in ("half", "float16"):
        return "; float16 checkpoints are read as bfloat16"
    return ""


def _attributes() -> str:
    """What help(EngineConfig) says of each option, from the one place where it is written."""
    lines = ["", "    Attributes:"]
    for f in dataclasses.fields(EngineConfig):
        choices = f" One of {', '.join(f.metadata['choices'])}." if f.metadata["choices"] else ""
        default = "" if f.default is None else f" Default: {f.default}."
        text = f"{f.name}: {f.metadata['doc']}.{choices}{default}"
        lines += textwrap.wrap(text, 110, initial_indent=" " * 8, subsequent_indent=" " * 12)
    return "\n".join(lines) + "\n    "


if EngineConfig.__doc__:  # not with python -OO
    EngineConfig.__doc__ += _attributes()
