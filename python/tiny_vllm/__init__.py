"""tiny_vllm: an LLM inference engine small enough to read.

>>> from tiny_vllm import Engine, SamplingParams
>>> engine = Engine()
>>> greedy = SamplingParams(temperature=0, max_tokens=1)
>>> engine.generate("The capital of France is", greedy)[0].outputs[0].text
' Paris'
"""

from __future__ import annotations

from tiny_vllm import _core
from tiny_vllm.async_engine import AsyncEngine
from tiny_vllm.config import EngineConfig
from tiny_vllm.engine import Engine
from tiny_vllm.errors import (
    DeviceError,
    EngineStoppedError,
    Error,
    InternalError,
    InvalidRequestError,
    ModelLoadError,
    OutOfMemoryError,
)
from tiny_vllm.llm import LLM
from tiny_vllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tiny_vllm.sampling_params import RequestOutputKind, SamplingParams
from tiny_vllm.structured_outputs import StructuredOutputsParams

__version__: str = _core.build_info()["version"]

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "DeviceError",
    "Engine",
    "EngineConfig",
    "EngineStoppedError",
    "Error",
    "InternalError",
    "InvalidRequestError",
    "Logprob",
    "ModelLoadError",
    "OutOfMemoryError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]
