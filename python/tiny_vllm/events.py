"""What the engine did, step by step, and two files of it.

One is for `tiny-vllm trace view`, in the format of docs/trace.md. The other is in Chrome's trace event
format, which ui.perfetto.dev opens.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny_vllm.detokenizer import Detokenizer
from tiny_vllm.plain_files import write_whole
from tiny_vllm.tokenizer import Tokenizer


class Events:
    """The record of an engine from its start up to now. ``print()`` it: a line for each step, in words.

    Attributes:
        engine: what does not change: model, device, scheduler, sizes.
        sequences: a dict for each sequence, in order of arrival. Steps name them by their place here.
        steps: a dict for each step: who was admitted and preempted, which positions were computed, which
            blocks were given, copied and evicted, how long the queues were, when it began and ended, and
            which tokens came out. docs/trace.md explains every field. Times are in seconds since the first
            request arrived.
    """

    def __init__(
        self,
        engine: Mapping[str, Any],
        sequences: Sequence[Mapping[str, Any]],
        steps: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer | None,
    ) -> None:
        """`sequences` and `steps` are the core's: times of time.monotonic(), steps not numbered yet."""
        began = sequences[0]["arrival"] if sequences else 0.0
        self.engine = dict(engine)
        self.sequences: list[dict[str, Any]] = [
            {
                **s,
                "arrival": s["arrival"] - began,
                "end": None if s["end"] is None else s["end"] - began,
            }
            for s in sequences
        ]
        self.steps: list[dict[str, Any]] = [
            {"step": i, **s, "times": _rising(t - began for t in s["times"])} for i, s in enumerate(steps, 1)
        ]
        self._tokenizer = tokenizer
        # Whose end is told with a token. The others were stopped from outside, or failed.
        self._told = {s for step in self.steps for s, _, reason in step["sampled"] if reason}

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        return "\n".join(self._in_words(step) for step in self.steps)

    def name(self, sequence: int) -> str:
        """The request's id; of n outputs, all but the first have their index after it."""
        s = self.sequences[sequence]
        return f"{s['request_id']}[{s['index']}]" if s["index"] else str(s["request_id"])

    def _in_words(self, step: Mapping[str, Any]) -> str:
        """ "step 12: 37 of 512 tokens; admitted b (16 cached); prefill b [16, 52); decode a" """
        parts = [f"{step['num_tokens']} of {self.engine['max_num_batched_tokens']} tokens"]
        parts += [
            f"{self.name(s)} gave its blocks back"
            if s in self._told
            else f"{self.name(s)} ended: {self.sequences[s]['finish_reason']}"
            for s in step["released"]
        ]
        parts += [self._why_preempted(s, step) for s in step["preempted"]]
        parts += [f"admitted {self.name(s)}" + f" ({n} cached)" * (n > 0) for s, n in step["admitted"]]
        parts += [f"{self.name(s)} found {n} in the cache" for s, n in step["hits"]]
        chunks = [(s, start, count, self._is_decode(s, start, count)) for s, start, count in step["chunks"]]
        parts += [f"prefill {self.name(s)} [{a}, {a + n})" for s, a, n, is_decode in chunks if not is_decode]
        decodes = [self.name(s) for s, _, _, is_decode in chunks if is_decode]
        if decodes:
            parts.append(f"decode {' '.join(decodes)}")
        parts += [f"copied block {a} to {b}" for a, b in step["copies"]]
        if step["evicted"]:
            parts.append(f"evicted blocks {', '.join(map(str, step['evicted']))}")
        parts += [f"{self.name(s)} ended: {reason}" for s, _, reason in step["sampled"] if reason]
        return f"step {step['step']}: {'; '.join(parts)}"

    def _why_preempted(self, sequence: int, step: Mapping[str, Any]) -> str:
        mine = self.sequences[sequence]["priority"]
        for other, _ in step["admitted"]:
            if self.sequences[other]["priority"] < mine:
                who, whose = self.name(other), self.sequences[other]["priority"]
                whom = f"{self.name(sequence)} (priority {mine})"
                return f"preempted {whom}: {who} (priority {whose}) took its place"
        return f"preempted {self.name(sequence)}: no block was left"

    def _is_decode(self, sequence: int, start: int, count: int) -> bool:
        return count == 1 and start >= len(self.sequences[sequence]["prompt_token_ids"])

    def trace(self) -> dict[str, Any]:
        """For `tiny-vllm trace view`: docs/trace.md is its specification."""
        tokens: list[list[int]] = [[] for _ in self.sequences]
        stopped_by: set[int] = set()  # sequences whose last token ended them
        for step in self.steps:
            for sequence, token, reason in step["sampled"]:
                tokens[sequence].append(token)
                if reason == "stop":
                    stopped_by.add(sequence)
        sequences = []
        for i, (s, generated) in enumerate(zip(self.sequences, tokens, strict=True)):
            prompt: list[int] = s["prompt_token_ids"]
            shown = {name: value for name, value in s.items() if name != "prompt_token_ids"}
            shown["num_prompt_tokens"] = len(prompt)
            shown["tokens"] = generated
            shown["prompt"] = shown["pieces"] = None
            if self._tokenizer is not None:
                shown["prompt"] = self._tokenizer.decode(prompt, skip_special_tokens=False)
                shown["pieces"] = _pieces(self._tokenizer, prompt, generated, i in stopped_by)
            sequences.append(shown)
        return {
            "format": "tiny-vllm-trace",
            "version": 1,
            "engine": self.engine,
            "sequences": sequences,
            "steps": self.steps,
        }

    def chrome_trace(self) -> dict[str, Any]:
        """For ui.perfetto.dev: what the engine was at, who sat in which seat, and the queues as curves."""
        events: list[dict[str, Any]] = [
            _named("process_name", 1, 0, f"engine: {self.engine['model']}"),
            _named("process_name", 2, 0, "seats: who computes"),
        ]
        events += [_named("thread_name", 1, i, name) for i, name in enumerate(_ROWS)]
        free_at = [0.0] * len(_ROWS)
        for step in self.steps:
            schedule, forward, forward_end, end = step["times"]
            label = {"step": step["step"], "tokens": step["num_tokens"], "what": self._in_words(step)}
            if step["chunks"]:
                events.append(_slice(f"schedule {step['step']}", 1, 0, schedule, forward, label))
                # Where the host is a step ahead, two of them overlap.
                row = 1 if free_at[1] <= forward else 2
                free_at[row] = forward_end
                events.append(_slice(f"step {step['step']}", 1, row, forward, forward_end, label))
                events.append(_slice(f"sample {step['step']}", 1, 3, forward_end, end, label))
            blocks = {
                "owned": self.engine["num_blocks"] - step["free_blocks"],
                "cached": step["cached_blocks"],
            }
            events.append(_counter("requests", schedule, {n: step[n] for n in ("running", "waiting")}))
            events.append(_counter("KV cache blocks", schedule, blocks))
            events.append(_counter("tokens of the step", schedule, {"tokens": step["num_tokens"]}))
            for sequence in step["preempted"]:
                name = f"preempted {self.name(sequence)}"
                events.append({"name": name, "ph": "i", "s": "g", "pid": 1, "tid": 0, "ts": schedule * 1e6})
        events += self._seats()
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _seats(self) -> Iterator[dict[str, Any]]:
        """A row for each seat. Decodes that follow each other are one slice."""
        seat_of: dict[int, int] = {}
        begun: dict[int, tuple[float, float, int]] = {}  # by sequence: start, end and number of its decodes
        free_at: dict[int, float] = {}

        def end_decodes(sequence: int) -> Iterator[dict[str, Any]]:
            if sequence in begun:
                start, end, count = begun.pop(sequence)
                yield _slice(f"{self.name(sequence)} decode x {count}", 2, seat_of[sequence], start, end, {})

        for step in self.steps:
            for sequence in [*step["released"], *step["preempted"]]:
                yield from end_decodes(sequence)
                seat_of.pop(sequence, None)
            for sequence, start, count in step["chunks"]:
                if sequence not in seat_of:
                    taken = set(seat_of.values())
                    seat_of[sequence] = next(i for i in range(len(taken) + 1) if i not in taken)
                seat = seat_of[sequence]
                begin, end = max(step["times"][1], free_at.get(seat, 0.0)), step["times"][3]
                free_at[seat] = end
                if self._is_decode(sequence, start, count):
                    first, _, decodes = begun.get(sequence, (begin, end, 0))
                    begun[sequence] = (first, end, decodes + 1)
                else:
                    yield from end_decodes(sequence)
                    name = f"{self.name(sequence)} prefill {start}..{start + count}"
                    yield _slice(name, 2, seat, begin, end, {"step": step["step"], "tokens": count})
        for sequence in tuple(begun):
            yield from end_decodes(sequence)

    def write(self, path: str | Path) -> tuple[Path, Path]:
        """Writes the trace to `path`, and the one for Perfetto beside it as ``<name>.perfetto.json``.

        Returns both paths. Raises OSError when one cannot be written.
        """
        path = Path(path)
        if not path.name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        perfetto = perfetto_file(path)
        for file, content in ((path, self.trace()), (perfetto, self.chrome_trace())):
            _write(file, json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")
        return path, perfetto


def _write(file: Path, text: str) -> None:
    try:
        if file.exists() and not file.is_file():  # a device
            file.write_text(text, encoding="utf-8")
        else:
            write_whole(file, text)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(file)) from None


def perfetto_file(trace: Path) -> Path:
    return trace.with_name(f"{trace.name.removesuffix('.json')}.perfetto.json")


_ROWS = ("schedule", "forward", "forward, started early", "sample")


def _rising(times: Iterator[float]) -> list[float]:
    """What has not happened, in a step that failed or is under way, has the time of what was before it."""
    result: list[float] = []
    for time in times:
        result.append(max(time, result[-1]) if result else time)
    return result


def _pieces(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], stopped: bool) -> list[str]:
    """What each token adds to the text: the last one nothing, if it ended the output. A stop string stays."""
    detokenizer = Detokenizer(tokenizer, prompt)
    ended_by = len(tokens) - 1 if stopped else len(tokens)
    pieces = ["" if i == ended_by else detokenizer.add([token]) for i, token in enumerate(tokens)]
    if pieces:
        pieces[-1] += detokenizer.finish()
    return pieces


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, pid: int, tid: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    duration = max(0.0, end - start) * 1e6
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": start * 1e6, "dur": duration, "args": args}


def _counter(name: str, time: float, values: dict[str, int]) -> dict[str, Any]:
    return {"name": name, "ph": "C", "pid": 1, "tid": 0, "ts": time * 1e6, "args": values}
