"""Small steps that many engine tests take."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fixtures
from tiny_vllm.engine import Engine
from tiny_vllm.outputs import CompletionOutput, RequestOutput
from tiny_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import pytest

# A small engine for the command line.
MODEL_OPTIONS = ["--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "4194304"]

DEVICE = os.environ.get("TINY_VLLM_TEST_DEVICE", "cpu")  # set by pytest --device


def open_engine(folder: Path, *, num_blocks: int | None = None, **options: Any) -> Engine:
    """An engine in float32 with exactly `num_blocks` blocks, by default 256, on what pytest --device says.

    On one thread, because the models are small and the tests run side by side. That more threads change
    nothing is what test_determinism.py tests.
    """
    options = {"device": DEVICE, "dtype": "float32", "num_threads": 1, "block_size": 16, **options}
    if "kv_cache_memory_bytes" not in options:
        options["kv_cache_memory_bytes"] = fixtures.kv_bytes(
            folder, num_blocks or 256, options["block_size"], options["dtype"]
        )
    return Engine(folder, **options)


def greedy(max_tokens: int = 16, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)


def prompt_of(n: int, seed: int = 0, vocabulary: int = 256) -> list[int]:
    """`n` pseudo-random ids, different for each seed. xorshift: no library decides what they are."""
    x = (seed * 2654435761 + 88172645463325252) % 2**64
    ids = []
    for _ in range(n):
        x ^= (x << 13) % 2**64
        x ^= x >> 7
        x ^= (x << 17) % 2**64
        ids.append((x >> 11) % vocabulary)
    return ids


def tokens_of(output: RequestOutput, index: int = 0) -> list[int]:
    return list(output.outputs[index].token_ids)


class Near(float):
    """On a GPU the order of a sum depends on the size of the batch: a log probability in float32 is off by
    some 1e-6. Tokens, ranks and texts must be the same there too.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Near) and abs(float(self) - float(other)) < 1e-4

    __hash__ = None  # type: ignore[assignment]


def exact(output: RequestOutput) -> list[Any]:
    """All that must not depend on who else is in the batch; on the CPU not one bit of a logprob."""
    prompt = [row and exact_row(row) for row in output.prompt_logprobs or ()]
    return [prompt, *(_exact_completion(c) for c in output.outputs)]


def _exact_completion(c: CompletionOutput) -> tuple[Any, ...]:
    return c.index, c.token_ids, c.text, c.finish_reason, [exact_row(row) for row in c.logprobs or ()]


def exact_row(row: dict[int, Any]) -> list[tuple[int, Any, int]]:
    value = float.hex if DEVICE == "cpu" else Near
    return [(token, value(entry.logprob), entry.rank) for token, entry in row.items()]


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Steps until nobody is left; the last output of each request."""
    last: dict[str, RequestOutput] = {}
    for _ in range(100_000):
        if not engine.has_unfinished_requests():
            return last
        last.update((output.request_id, output) for output in engine.step())
    raise AssertionError("100,000 steps and no end")


def check_all_blocks_are_back(engine: Engine) -> None:
    metrics = engine.metrics()
    assert metrics["num_free_blocks"] == metrics["num_blocks"]
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    engine._core.check_invariants()


def run_a_day(engine: Engine) -> dict[str, RequestOutput]:
    """Prompts with a beginning in common, n > 1, an abort, more than there is room for."""
    common = prompt_of(40)
    for i in range(5):
        engine.add_request(f"common-{i}", [*common, i], greedy(12))
    engine.add_request("three", prompt_of(20, seed=2), SamplingParams(n=3, seed=1, max_tokens=15))
    outputs: dict[str, RequestOutput] = {}
    for i in range(200):
        if i == 4:
            engine.add_request("gone", prompt_of(30, seed=3), greedy(40))
            engine.add_request("text", prompt_of(70, seed=4), greedy(9))
        if i == 11:
            engine.abort_request("gone")
        for output in engine.step():
            outputs[output.request_id] = output
        if i > 11 and not engine.has_unfinished_requests():
            break
    outputs.update(finish(engine))
    check_all_blocks_are_back(engine)
    return outputs


def solo(folder: Path, prompts: Sequence[Any], params: SamplingParams, **options: Any) -> list[RequestOutput]:
    """Each prompt alone in an engine with a huge pool and no prefix cache: the oracle of scheduling tests."""
    engine = open_engine(folder, enable_prefix_caching=False, **options)
    return [engine.generate(prompt, params)[0] for prompt in prompts]


def python_process(script: str) -> list[str]:
    """The command line of another Python that finds the same tiny_vllm and these helpers.

    Ctrl-C works there even when a shell that runs the tests in the background has switched it off.
    """
    paths = [p for p in sys.path if p]
    begin = f"import signal, sys; sys.path[:0] = {paths!r}"
    return [
        sys.executable,
        "-c",
        f"{begin}; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"signal.signal(signal.SIGQUIT, signal.SIG_DFL)\n{script}",
    ]


class Run:
    """`tiny-vllm ARGUMENTS` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() replaces it
        monkeypatch.setenv("COLUMNS", "80")
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)

    def __call__(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        from tiny_vllm import cli  # not for those who need another helper, in a process of their own

        self.monkeypatch.setattr(sys, "argv", ["tiny-vllm", *arguments])
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode("utf-8"))))
        try:
            cli.main()
            code: object = 0
        except SystemExit as end:
            code = end.code
        out, err = self.capsys.readouterr()
        return int(str(code or 0)), out, err
