"""The command line: ``tiny-vllm run``, ``chat``, ``bench``, ``trace``, ``convert`` and ``info``.

Each command is a file. Importing it makes the command known; the help lists them in this order.
"""

from __future__ import annotations

from tiny_vllm.cli.app import main

# isort: off
from tiny_vllm.cli import run
from tiny_vllm.cli import chat
from tiny_vllm.cli import bench
from tiny_vllm.cli import trace
from tiny_vllm.cli import convert
from tiny_vllm.cli import info
# isort: on

__all__ = ["bench", "chat", "convert", "info", "main", "run", "trace"]
