"""What the engine decided, step by step: the file it writes, and the page that shows it (docs/trace.md)."""

from __future__ import annotations

from tiny_vllm.trace.format import TraceError, check_trace, read_trace
from tiny_vllm.trace.view import make_page

__all__ = ["TraceError", "check_trace", "make_page", "read_trace"]
