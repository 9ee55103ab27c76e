"""Reads a trace and checks it against the format of docs/trace.md.

A trace may come from anywhere, and the page that shows it believes what it says: a wrong index would end in
the middle of a drawing. So everything the page relies on is checked here, where an error can name the place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tiny_vllm.errors import Error, shown

FINISH_REASONS = ("stop", "length", "abort", "error")
MAX_INT = 2**31 - 1  # a token, a position: the core's int32
MAX_BLOCKS = 4_000_000  # the page keeps some numbers for each


class TraceError(Error, ValueError):
    """A file is no trace that can be shown. Says which file and field, and what was expected and found."""


def read_trace(file: Path) -> dict[str, Any]:
    """The trace in a file, checked."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror}") from None
    try:
        trace = json.loads(data.decode("utf-8"), parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file} is not JSON: {error}") from None
    check_trace(trace, str(file))
    return trace  # type: ignore[no-any-return]  # check_trace has seen that it is a dict


def check_trace(trace: object, name: str = "trace") -> None:
    """Raises TraceError when `trace` is not in the format. `name` is how the message calls it."""
    _Checker(name).trace(trace)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


class _Checker:
    def __init__(self, name: str) -> None:
        self.name = name

    def fail(self, field: str, expected: str, found: object) -> NoReturn:
        raise TraceError(f"{self.name}: {field} must be {expected}; it is {shown(found)}")

    # --- Values ---

    def get(self, holder: Any, key: str, field: str) -> Any:
        if key not in holder:
            raise TraceError(
                f"{self.name}: {field}.{key} is missing" if field else f"{self.name}: {key} is missing"
            )
        return holder[key]

    def integer(self, value: object, field: str, low: int = 0, high: int = MAX_INT) -> int:
        if type(value) is not int or not low <= value <= high:
            self.fail(field, f"an integer from {low} to {high}", value)
        return value

    def number(self, value: object, field: str) -> float:
        if type(value) not in (int, float) or not 0 <= value < 1e12:  # type: ignore[operator]
            self.fail(field, "a number of seconds, 0 or more", value)
        return value  # type: ignore[return-value]

    def text(self, value: object, field: str) -> str:
        if not isinstance(value, str):
            self.fail(field, "a string", value)
        return value

    def table(self, value: object, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(field, "an object", value)
        return value

    def array(self, value: object, field: str, length: int | None = None) -> list[Any]:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            self.fail(field, "a list" if length is None else f"a list of {length}", value)
        return value

    def each(
        self, holder: dict[str, Any], key: str, field: str, check: Callable[[Any, str], object]
    ) -> list[Any]:
        values = self.array(self.get(holder, key, field), f"{field}.{key}")
        for i, value in enumerate(values):
            check(value, f"{field}.{key}[{i}]")
        return values

    # --- The trace ---

    def trace(self, trace: object) -> None:
        if not isinstance(trace, dict) or trace.get("format") != "tiny-vllm-trace":
            raise TraceError(
                f'{self.name} is not a trace of tiny-vllm: it has no "format": "tiny-vllm-trace" '
                "(a timeline for Perfetto is another file)"
            )
        if type(trace.get("version")) is not int or trace["version"] != 1:
            raise TraceError(
                f"{self.name}: version is {shown(trace.get('version'))}; this tiny-vllm reads version 1"
            )
        self.engine(self.table(self.get(trace, "engine", ""), "engine"))
        sequences = self.array(self.get(trace, "sequences", ""), "sequences")
        self.num_sequences = len(sequences)
        for i, sequence in enumerate(sequences):
            self.sequence(self.table(sequence, f"sequences[{i}]"), i)
        steps = self.array(self.get(trace, "steps", ""), "steps")
        if not steps:
            raise TraceError(f"{self.name}: steps is empty; there is nothing to show")
        self.sampled = [0] * self.num_sequences
        self.generated = [len(s["tokens"]) for s in sequences]
        start = 0.0
        for i, step in enumerate(steps):
            times = self.step(self.table(step, f"steps[{i}]"), f"steps[{i}]", i)
            if times[0] < start:
                self.fail(f"steps[{i}].times[0]", f"{start} or more, where the step before began", times[0])
            start = times[0]

    def engine(self, engine: dict[str, Any]) -> None:
        for key in ("model", "device", "scheduling_policy"):
            self.text(self.get(engine, key, "engine"), f"engine.{key}")
        if self.get(engine, "scheduler", "engine") not in ("continuous", "static"):
            self.fail("engine.scheduler", '"continuous" or "static"', engine["scheduler"])
        for key in ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            most = MAX_BLOCKS if key == "num_blocks" else MAX_INT
            self.integer(self.get(engine, key, "engine"), f"engine.{key}", 1, most)
        if not isinstance(self.get(engine, "enable_prefix_caching", "engine"), bool):
            self.fail("engine.enable_prefix_caching", "true or false", engine["enable_prefix_caching"])
        self.num_blocks: int = engine["num_blocks"]

    def sequence(self, sequence: dict[str, Any], i: int) -> None:
        field = f"sequences[{i}]"
        self.text(self.get(sequence, "request_id", field), f"{field}.request_id")
        self.integer(self.get(sequence, "index", field), f"{field}.index")
        if self.get(sequence, "parent", field) is not None:
            self.sequence_number(sequence["parent"], f"{field}.parent")
        self.integer(self.get(sequence, "priority", field), f"{field}.priority", -(2**63), 2**63)
        self.number(self.get(sequence, "arrival", field), f"{field}.arrival")
        if self.get(sequence, "end", field) is not None:
            self.number(sequence["end"], f"{field}.end")
        self.reason(self.get(sequence, "finish_reason", field), f"{field}.finish_reason")
        self.integer(self.get(sequence, "num_prompt_tokens", field), f"{field}.num_prompt_tokens", 1)
        if self.get(sequence, "prompt", field) is not None:
            self.text(sequence["prompt"], f"{field}.prompt")
        tokens = self.each(sequence, "tokens", field, self.integer)
        if self.get(sequence, "pieces", field) is not None:
            pieces = self.each(sequence, "pieces", field, self.text)
            if len(pieces) != len(tokens):
                self.fail(f"{field}.pieces", f"as long as tokens, which has {len(tokens)}", len(pieces))

    def step(self, step: dict[str, Any], field: str, i: int) -> Sequence[float]:
        self.integer(self.get(step, "step", field), f"{field}.step")
        times: list[float] = self.each(step, "times", field, self.number)
        if len(times) != 4 or sorted(times) != times:
            self.fail(f"{field}.times", "four times in order", times)
        for key in ("num_tokens", "running", "waiting"):
            self.integer(self.get(step, key, field), f"{field}.{key}")
        for key in ("free_blocks", "cached_blocks"):
            self.integer(self.get(step, key, field), f"{field}.{key}", 0, self.num_blocks)
        for key in ("released", "preempted"):
            self.each(step, key, field, self.sequence_number)
        self.each(step, "admitted", field, self.admission)
        if "hits" in step:
            self.each(step, "hits", field, self.admission)
        self.each(step, "tables", field, self.block_table)
        self.each(step, "copies", field, self.copy)
        self.each(step, "evicted", field, self.block)
        self.each(step, "chunks", field, self.chunk)
        self.each(step, "sampled", field, self.sample)
        return times

    # --- What stands in the lists of a step ---

    def sequence_number(self, value: object, field: str) -> int:
        if type(value) is not int or not 0 <= value < self.num_sequences:
            self.fail(field, f"one of the {self.num_sequences} sequences, counted from 0", value)
        return value

    def block(self, value: object, field: str) -> None:
        if type(value) is not int or not 0 <= value < self.num_blocks:
            self.fail(field, f"one of the {self.num_blocks} blocks, counted from 0", value)

    def reason(self, value: object, field: str) -> None:
        if value is not None and value not in FINISH_REASONS:
            self.fail(field, f"null or one of {', '.join(FINISH_REASONS)}", value)

    def admission(self, value: object, field: str) -> None:
        sequence, cached = self.array(value, field, 2)
        self.sequence_number(sequence, f"{field}[0]")
        self.integer(cached, f"{field}[1]")

    def block_table(self, value: object, field: str) -> None:
        sequence, first, blocks = self.array(value, field, 3)
        self.sequence_number(sequence, f"{field}[0]")
        self.integer(first, f"{field}[1]")
        for i, block in enumerate(self.array(blocks, f"{field}[2]")):
            self.block(block, f"{field}[2][{i}]")

    def copy(self, value: object, field: str) -> None:
        for i, block in enumerate(self.array(value, field, 2)):
            self.block(block, f"{field}[{i}]")

    def chunk(self, value: object, field: str) -> None:
        sequence, start, count = self.array(value, field, 3)
        self.sequence_number(sequence, f"{field}[0]")
        self.integer(start, f"{field}[1]")
        self.integer(count, f"{field}[2]", 1)

    def sample(self, value: object, field: str) -> None:
        sequence, token, reason = self.array(value, field, 3)
        self.sequence_number(sequence, f"{field}[0]")
        self.integer(token, f"{field}[1]")
        self.reason(reason, f"{field}[2]")
        self.sampled[sequence] += 1
        if self.sampled[sequence] > self.generated[sequence]:
            raise TraceError(
                f"{self.name}: {field} is token {self.sampled[sequence]} of sequence {sequence}, "
                f"whose list of tokens has {self.generated[sequence]}"
            )
