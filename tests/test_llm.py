"""vLLM's offline interface: the programs of its documentation, with another import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import DEVICE, greedy, open_engine
from tiny_vllm import LLM, InvalidRequestError, SamplingParams
from tiny_vllm.sampling_params import RequestOutputKind, StructuredOutputsParams


@pytest.fixture(scope="module")
def llm(rand_folder: Path) -> LLM:
    return LLM(
        model=str(rand_folder), dtype="float32", seed=3, max_model_len=256, max_num_seqs=8, device=DEVICE,
        kv_cache_memory_bytes=1 << 24, tensor_parallel_size=1, trust_remote_code=True, enforce_eager=True,
    )  # fmt: skip


def test_the_quick_start(llm: LLM, rand_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = ["Hello, my name is", "The capital of France is"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=5))
    assert [output.prompt for output in outputs] == prompts
    engine = open_engine(rand_folder)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=5)
    assert [o.outputs[0].text for o in outputs] == [
        o.outputs[0].text for o in engine.generate(prompts, params)
    ]
    assert capfd.readouterr().out == ""


def test_its_calls(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=4, structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, sampling_params=params, use_tqdm=False)
    assert output.outputs[0].text in ("a", "b")
    (output,) = llm.generate(prompts="x", sampling_params=[greedy(2)])
    assert len(output.outputs[0].token_ids) == 2
    assert len(llm.generate(["x"])[0].outputs[0].token_ids) == 16, "vLLM's default"
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("ab") == [97, 98]
    assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(InvalidRequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"tensor_parallel_size": 2}, InvalidRequestError, "tensor_parallel_size=2 is not supported"),
        ({"quantization": "awq"}, InvalidRequestError, "quantization='awq' is not supported"),
        ({"max_sequences": 2}, TypeError, "no option 'max_sequences'"),
    ],
)
def test_what_is_not_here(
    options: dict[str, Any], kind: type[Exception], message: str, rand_folder: Path
) -> None:
    with pytest.raises(kind, match=message):
        LLM(rand_folder, **options)


def test_arguments(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="use_tqdm must be True or False, got 3"):
        llm.generate("x", greedy(1), use_tqdm=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="scheduling_policy is fcfs"):
        llm.generate(["x"], greedy(1), priority=[1])
