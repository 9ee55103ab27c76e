"""tiny_vllm: an LLM inference engine small enough to read."""

from __future__ import annotations

from tiny_vllm import _core
from tiny_vllm.errors import (
    DeviceError,
    Error,
    InternalError,
    InvalidRequestError,
    ModelLoadError,
    OutOfMemoryError,
)

__all__ = [
    "DeviceError",
    "Error",
    "InternalError",
    "InvalidRequestError",
    "ModelLoadError",
    "OutOfMemoryError",
    "_core",
]
