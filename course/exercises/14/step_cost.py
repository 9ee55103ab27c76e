"""Exercise 14.2: what a step costs, before it is run.

rows_computed(prompt, answer, cached)   rows that go through the model until `answer` tokens are there
kv_bytes(layers, kv_heads, head_dim)    keys and values of one token in all layers, in bfloat16
step_seconds(device, model, contexts)   at least, for a step of one decode for each of these contexts
most_decodes(device, model, context)    with how many decodes of this context reading and computing take
                                        equally long, rounded down; None if reading always takes longer

A context is the number of tokens whose keys and values a decode reads. The step reads the weights once, and
each request's own keys and values. It computes two operations for each number of the weights and each
request; leave those of attention out. What takes longer, reading or computing, decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    bytes_per_second: float
    operations_per_second: float


@dataclass(frozen=True)
class Model:
    parameters: int  # of two bytes each
    kv_bytes: int  # of a token


def rows_computed(prompt: int, answer: int, cached: bool) -> int:
    raise NotImplementedError("Your turn")


def kv_bytes(layers: int, kv_heads: int, head_dim: int) -> int:
    raise NotImplementedError("Your turn")


def step_seconds(device: Device, model: Model, contexts: Sequence[int]) -> float:
    raise NotImplementedError("Your turn")


def most_decodes(device: Device, model: Model, context: int) -> int | None:
    raise NotImplementedError("Your turn")
