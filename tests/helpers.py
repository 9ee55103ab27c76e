"""Small steps that many engine tests take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fixtures
from tiny_vllm.engine import Engine
from tiny_vllm.outputs import CompletionOutput, RequestOutput
from tiny_vllm.sampling_params import SamplingParams


def open_engine(folder: Path, *, num_blocks: int | None = None, **options: Any) -> Engine:
    """An engine on the CPU in float32, with exactly `num_blocks` blocks, by default 256.

    On one thread, because the models are small and the tests run side by side. That more threads change
    nothing is what test_determinism.py tests.
    """
    options = {"device": "cpu", "dtype": "float32", "num_threads": 1, "block_size": 16, **options}
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


def exact(output: RequestOutput) -> list[Any]:
    """All that must not depend on who else is in the batch, to the last bit of each log probability."""
    prompt = [row and _exact_row(row) for row in output.prompt_logprobs or ()]
    return [prompt, *(_exact_completion(c) for c in output.outputs)]


def _exact_completion(c: CompletionOutput) -> tuple[Any, ...]:
    return c.index, c.token_ids, c.text, c.finish_reason, [_exact_row(row) for row in c.logprobs or ()]


def _exact_row(row: dict[int, Any]) -> list[tuple[int, str, int]]:
    return [(token, entry.logprob.hex(), entry.rank) for token, entry in row.items()]


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


def solo(folder: Path, prompts: Sequence[Any], params: SamplingParams, **options: Any) -> list[RequestOutput]:
    """Each prompt alone in an engine with a huge pool and no prefix cache: the oracle of scheduling tests."""
    engine = open_engine(folder, enable_prefix_caching=False, **options)
    return [engine.generate(prompt, params)[0] for prompt in prompts]


def python_process(script: str) -> list[str]:
    """The command line of another Python that finds the same tiny_vllm and these helpers."""
    paths = [p for p in sys.path if p]
    return [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{script}"]
