"""The errors a person meets. The C++ core raises these same classes."""

from __future__ import annotations


class Error(Exception):
    """Base of every error that tiny_vllm raises on purpose."""


class ModelLoadError(Error, ValueError):
    """A model folder cannot be used. Says which file, tensor or field, and what was expected and found."""


class InvalidRequestError(Error, ValueError):
    """A request or an engine argument is out of range. Says which field, and the allowed range."""


class OutOfMemoryError(Error, MemoryError):
    """Says how much memory was wanted, how much there is, and which argument to lower."""


class DeviceError(Error, RuntimeError):
    """A device cannot be used, or one of its calls failed. Says which, and what to do about it."""


class EngineStoppedError(Error, RuntimeError):
    """An AsyncEngine takes no more requests: it was shut down, or its engine failed. Says which, and why."""


class InternalError(Error, RuntimeError):
    """A broken promise inside the engine: a bug of tiny_vllm. Please report it with the message."""


def shown(value: object) -> str:
    """A value as messages show it: short, and without an error of its own, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an integer of 5,000 digits, nested too deeply, a broken __repr__
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
