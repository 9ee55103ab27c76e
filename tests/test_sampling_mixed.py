"""Requests of all kinds in one batch: each gets the tokens and log probabilities that it gets alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import exact, finish, open_engine, prompt_of
from tiny_vllm.sampling_params import SamplingParams


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    """With counts of log probabilities around the most that a GPU reports itself, and beyond."""
    some: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.0, "logprobs": 1, "repetition_penalty": 1.2},
        {"seed": 1, "logprobs": 20, "top_p": 0.9},
        {"seed": 2, "logprobs": 64, "frequency_penalty": 0.4, "top_k": 50},
        {"seed": 3, "logprobs": 65, "presence_penalty": 1.0},
        {"seed": 4, "presence_penalty": -0.5, "frequency_penalty": 0.2},
        {"seed": 5, "n": 3, "logprobs": 2, "repetition_penalty": 1.5, "min_p": 0.02},
        {"seed": 6, "n": 2, "frequency_penalty": 1.0},
        {"seed": 7, "logprobs": 512, "temperature": 1.3},
        {"seed": 8, "prompt_logprobs": 3, "repetition_penalty": 0.9, "logprobs": 5},
    ]
    lengths = [5, 40, 3, 1, 17, 33, 16, 20, 8, 2, 30]
    return [
        (prompt_of(length, seed=i), SamplingParams(max_tokens=12 + 2 * i, ignore_eos=True, **fields))
        for i, (length, fields) in enumerate(zip(lengths, some, strict=True))
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 5},
        {"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 24},
    ],
    ids=["together", "chunked", "preempted"],
)
def test_a_mixed_batch_is_what_each_request_is_alone(options: dict[str, Any], rand_folder: Path) -> None:
    requests = mixed_requests()
    one = open_engine(rand_folder, enable_prefix_caching=False)
    alone = [exact(one.generate(*request)[0]) for request in requests]
    engine = open_engine(rand_folder, **options)
    for _ in range(2):  # the second time with what the first left in the prefix cache
        outputs = engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])
        assert [exact(output) for output in outputs] == alone
    assert (engine.metrics()["num_preemptions"] > 0) == ("num_blocks" in options)


def test_requests_that_come_and_go_around_one_with_penalties(rand_folder: Path) -> None:
    """Rows move within the batch from step to step; each keeps its own history."""
    requests = mixed_requests()
    one = open_engine(rand_folder, enable_prefix_caching=False)
    alone = [exact(one.generate(*request)[0]) for request in requests]
    engine = open_engine(rand_folder)
    last = {}
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
        for _ in range(i % 3):
            last.update((output.request_id, output) for output in engine.step())
    last.update(finish(engine))
    assert [exact(last[str(i)]) for i in range(len(requests))] == alone
