"""What the Python API says to a person who gives it something else than it wants, and what help() says."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

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
@pytest.mark.parametrize("count", [-1, 2**31])
def test_the_range_of_logprobs_is_the_vocabulary(field: str, count: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: count})
    expected = f"{field} must be between 0 and the number of tokens in the vocabulary, got {count}"
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
