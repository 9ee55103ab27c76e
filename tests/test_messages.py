"""What the Python API says to a person who gives it something else than it wants, and what help() says."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import greedy, open_engine
from tiny_vllm import Engine, EngineConfig, InvalidRequestError, ModelLoadError, SamplingParams


@pytest.fixture(scope="module")
def engine(rand_folder: Path) -> Engine:
    return open_engine(rand_folder)


@pytest.mark.parametrize("prompts", [5, None, 1.5])
def test_prompts_of_another_type(engine: Engine, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"prompts must be text.*, got {type(prompts).__name__}"):
        engine.generate(prompts, greedy(1))


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, ["hi", "you"], None, 5])
def test_messages_of_another_type(engine: Engine, messages: Any) -> None:
    wanted = re.escape('messages must be a list like [{"role": "user", "content": "Hello"}], or a list of')
    found = "str" if isinstance(messages, list) else type(messages).__name__
    with pytest.raises(InvalidRequestError, match=f"{wanted}.*, got {found}"):
        engine.chat(messages)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        Engine(tmp_path)
    assert str(caught.value) == f"{tmp_path} is not a model folder: it has no config.json"


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("count", [-2, 2**31])
def test_the_range_of_logprobs_is_the_vocabulary(field: str, count: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: count})
    expected = (
        f"{field} must be between 0 and the number of tokens in the vocabulary, or -1 for all of them, "
    )
    expected += f"got {count}"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: EngineConfig(device="tpu"),
        lambda: EngineConfig(block_size=0),
        lambda: EngineConfig(seed=-1),
        lambda: EngineConfig(max_num_seqs="a"),
        lambda: SamplingParams(n=1.5),  # type: ignore[arg-type]
        lambda: SamplingParams(temperature=-1),
        lambda: SamplingParams(seed=2**63),
        lambda: SamplingParams(stop_token_ids=[-1]),
    ],
)
def test_all_say_in_the_same_form_what_they_got(wrong: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequestError, match=r"^\w+ must [^;]*, got \S+$"):
        wrong()


@pytest.mark.parametrize(
    "wrong",
    [0, 5, {}, {"n": 1}, "", "a", b"", [], [None], [5], (SamplingParams(),), SamplingParams, object()],
)
def test_sampling_params_of_another_type(engine: Engine, wrong: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: engine.stream("a", wrong),
        lambda: engine.start_stream("a", wrong),
        lambda: engine.add_request("x", "a", wrong),
    ]
    if not isinstance(wrong, (list, tuple)):
        calls += [lambda: engine.generate("a", wrong), lambda: engine.generate([], wrong)]
    for call in calls:
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert str(caught.value) == f"sampling_params must be SamplingParams, got {type(wrong).__name__}"
    assert not engine.has_unfinished_requests()


def test_lists_of_sampling_params(engine: Engine) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^sampling_params\[1\] must be SamplingParams, got NoneType$"
    ):
        engine.generate(["a", "b"], [greedy(1), None])  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="has 0 entries for 1 prompts"):
        engine.generate("a", [])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", "x"),
        ("n", None),
        ("temperature", float("nan")),
        ("max_tokens", "x"),
        ("seed", 10**30),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("logprobs", 10**6),
    ],
)
def test_nonsense_assigned_to_sampling_params(engine: Engine, field: str, value: object) -> None:
    params = SamplingParams(max_tokens=2)
    setattr(params, field, value)
    for call in (engine.generate, engine.stream, lambda prompt, p: engine.add_request("x", prompt, p)):
        with pytest.raises(InvalidRequestError, match=rf"^{field} "):
            call("a", params)


@pytest.mark.parametrize("wrong", [5, None, b"x", [], "\ud800", "a\udfffb"])
def test_request_ids_that_are_not_text(engine: Engine, wrong: Any) -> None:
    for call in (engine.abort_request, lambda request_id: engine.add_request(request_id, "a")):
        with pytest.raises(InvalidRequestError, match=r"^request_id must be "):
            call(wrong)


def its_own_prompt() -> dict[str, Any]:
    prompt: dict[str, Any] = {}
    prompt["prompt"] = prompt
    return prompt


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"x": 1, 5: 2}, r"has 'prompt' or 'prompt_token_ids', got \['x', 5\]"),
        ({}, r"has 'prompt' or 'prompt_token_ids', got \[\]"),
        (its_own_prompt(), "'prompt' of a prompt dict must be text, got dict"),
        ({"prompt": 5, "prompt_token_ids": [1]}, "'prompt' of a prompt dict must be text, got int"),
        ({"prompt": None}, "'prompt' of a prompt dict must be text, got None"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list of token ids, got str"),
        ({"prompt_token_ids": {"prompt": "a"}}, "prompt_token_ids must be a list of token ids, got dict"),
        ({"prompt_token_ids": None}, "prompt_token_ids must be a list of token ids, got NoneType"),
        ([2**31], "prompt token ids must be integers of the vocabulary, got 2147483648"),
    ],
)
def test_prompts_that_are_malformed(engine: Engine, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate(prompt, greedy(1))


@pytest.mark.parametrize("wrong", [5, b"x", [], object()])
def test_models_of_another_type(wrong: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"^model must be .*, got {type(wrong).__name__}$"):
        Engine(wrong)


def test_a_model_name_beyond_what_the_system_can_look_up() -> None:
    with pytest.raises(ModelLoadError, match=r"^'xxx.*: cannot be read: "):
        Engine("x" * 5000)


def test_progress_that_cannot_be_called(engine: Engine, rand_folder: Path) -> None:
    for call in (lambda: engine.generate("a", progress=5), lambda: Engine(rand_folder, progress=5)):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match=r"^progress must be a function of two numbers, got 5$"):
            call()


@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_beyond_all_others(digits: int) -> None:
    huge = 10**digits
    for field in ("temperature", "top_p", "min_p", "n", "top_k", "seed", "max_tokens"):
        with pytest.raises(InvalidRequestError, match=rf"^{field} must "):
            SamplingParams(**{field: huge})  # type: ignore[arg-type]
    for field in ("seed", "max_num_seqs", "scheduler"):
        with pytest.raises(InvalidRequestError, match=rf"^{field} must "):
            EngineConfig(**{field: huge})  # type: ignore[arg-type]


def test_an_array_for_a_choice() -> None:
    with pytest.raises(InvalidRequestError, match=r"^scheduler must be one of continuous, static, got array"):
        EngineConfig(scheduler=np.array(["static", "static"]))  # type: ignore[arg-type]


def test_the_number_of_a_gpu_is_not_a_device() -> None:
    hint = "; CUDA_VISIBLE_DEVICES chooses the GPU"
    with pytest.raises(InvalidRequestError, match=rf"^device must be one of auto, .*, got 'cuda:0'{hint}$"):
        EngineConfig(device="cuda:0")
    with pytest.raises(InvalidRequestError, match=r"got 'tpu'$"):
        EngineConfig(device="tpu")
    with pytest.raises(InvalidRequestError, match=r"got 'cuda:0'$"):
        EngineConfig(dtype="cuda:0")


def test_help_says_what_each_option_means() -> None:
    text = " ".join(str(inspect.getdoc(EngineConfig)).split())
    for f in fields(EngineConfig):
        assert f" {f.name}: {f.metadata['doc']}." in text
    assert "seed: draws the weights of load_format=dummy, and tokens of requests whose" in text
    assert "Default: continuous." in text
    assert all(len(line) <= 110 for line in str(EngineConfig.__doc__).splitlines())


def test_a_path_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        Engine(f".{os.sep}nowhere")
    expected = (
        f"nowhere: no such folder or file (looked in {tmp_path}); a model on the Hub is named owner/name"
    )
    assert str(caught.value) == expected
