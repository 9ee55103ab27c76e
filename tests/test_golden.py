"""The bundled model against Hugging Face transformers: see data/README.md for where the numbers come from."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import check_all_blocks_are_back, greedy, open_engine, tokens_of
from tiny_vllm.engine import Engine
from tiny_vllm.outputs import Logprob, RequestOutput
from tiny_vllm.tokenizer import Tokenizer

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "golden_smollm2.json").read_text("utf-8")
)
PROMPTS: list[dict[str, Any]] = GOLDEN["prompts"]
NEW_TOKENS = GOLDEN["oracle"]["new_tokens"]


@pytest.fixture(scope="module")
def float32(bundled_folder: Path) -> Engine:
    return open_engine(bundled_folder, num_blocks=400, max_model_len=2048, num_threads=2)


@pytest.fixture(scope="module")
def bfloat16(bundled_folder: Path) -> Engine:
    return open_engine(bundled_folder, num_blocks=400, max_model_len=2048, num_threads=2, dtype="bfloat16")


def logprob_of(row: dict[int, Logprob] | None, token: int) -> float:
    assert row is not None
    return row[token].logprob


def prompt_nll(output: RequestOutput) -> np.ndarray:
    """Negative log likelihood of each prompt token but the first."""
    rows = output.prompt_logprobs
    assert rows is not None
    assert rows[0] is None
    return -np.array(
        [logprob_of(row, token) for row, token in zip(rows[1:], output.prompt_token_ids[1:], strict=True)]
    )


def test_the_weights_are_those_of_the_goldens(bundled_folder: Path) -> None:
    digest = hashlib.sha256((bundled_folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest == GOLDEN["weights_sha256"]


def test_prompt_ids(bundled_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(bundled_folder)
    for prompt in PROMPTS:
        assert tokenizer.encode(prompt["text"]) == prompt["prompt_ids"], prompt["name"]
        assert tokenizer.decode(prompt["greedy_ids"], skip_special_tokens=False) == prompt["greedy_text"]


def test_chat_template(bundled_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(bundled_folder)
    chats = [p for p in PROMPTS if "messages" in p]
    assert len(chats) >= 2
    for prompt in chats:
        assert tokenizer.encode_chat(prompt["messages"]) == prompt["prompt_ids"], prompt["name"]


def test_float32_short_prompts(float32: Engine) -> None:
    check_float32(float32, [p for p in PROMPTS if p["n_prompt"] < 20])


@pytest.mark.slow
def test_float32_all_prompts(float32: Engine) -> None:
    assert len(PROMPTS) == 17
    check_float32(float32, PROMPTS)


def check_float32(engine: Engine, prompts: list[dict[str, Any]]) -> None:
    """One mixed batch. All 48 greedy ids; the five best logits after the prompt; the likelihood of the
    prompt.

    Logits are compared as differences to the best one, which is what log probabilities preserve.
    """
    params = greedy(NEW_TOKENS, ignore_eos=True, logprobs=5, prompt_logprobs=0)
    outputs = engine.generate([p["prompt_ids"] for p in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert tokens_of(output) == prompt["greedy_ids"], prompt["name"]
        completion = output.outputs[0]
        assert completion.logprobs is not None
        best = [token for token, _ in prompt["top5"]]
        assert list(completion.logprobs[0]) == best
        mine = np.array([completion.logprobs[0][token].logprob for token in best])
        reference = np.array([logit for _, logit in prompt["top5"]])
        np.testing.assert_allclose(mine - mine[0], reference - reference[0], rtol=0, atol=1e-3)
        if prompt["mean_nll"] is not None:
            assert prompt_nll(output).mean() == pytest.approx(prompt["mean_nll"], abs=1e-4), prompt["name"]
    check_all_blocks_are_back(engine)


def test_text_in_text_out(float32: Engine) -> None:
    """The same from text: prompt ids, generated text, and the text of a stream."""
    prompt = next(p for p in PROMPTS if p["name"] == "capital")
    params = greedy(16, ignore_eos=True)
    output = float32.generate(prompt["text"], params)[0]
    assert output.prompt_token_ids == prompt["prompt_ids"]
    assert tokens_of(output) == prompt["greedy_ids"][:16]
    text = output.outputs[0].text
    assert len(text) > 16
    assert prompt["greedy_text"].startswith(text)
    assert "".join(float32.stream(prompt["text"], params)) == text


def test_chat_ends_at_the_end_of_the_turn(float32: Engine) -> None:
    """chat() makes the golden prompt; generation_config.json's end token ends the answer and is not shown."""
    prompt = next(p for p in PROMPTS if p["name"] == "chat_gravity")
    output = float32.chat(prompt["messages"], greedy(1))[0]
    assert output.prompt_token_ids == prompt["prompt_ids"]
    assert tokens_of(output) == prompt["greedy_ids"][:1]

    (ending,) = (p for p in PROMPTS if p["first_eos_at"] is not None)
    output = float32.generate(ending["prompt_ids"], greedy(NEW_TOKENS))[0]
    assert tokens_of(output) == ending["greedy_ids"][: ending["first_eos_at"] + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text


# The reference's own bfloat16 never chooses another token where its float32 margin is above 0.174
# (hf_bf16_summary). Twice that leaves room for another order of rounding.
CLEAR_MARGIN = 0.35


@pytest.mark.slow
def test_bfloat16_teacher_forced(bfloat16: Engine) -> None:
    """Fed the reference's continuation, bfloat16 finds the same best token where the reference was sure."""
    fed = [p["prompt_ids"] + p["greedy_ids"] for p in PROMPTS]
    outputs = bfloat16.generate(fed, greedy(1, prompt_logprobs=1))
    clear = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        rows = output.prompt_logprobs
        assert rows is not None
        for i, (token, margin) in enumerate(zip(prompt["greedy_ids"], prompt["margins"], strict=True)):
            if margin > CLEAR_MARGIN:
                row = rows[prompt["n_prompt"] + i]
                assert row is not None
                assert row[token].rank == 1, f"{prompt['name']}, generated token {i}: margin {margin}"
                clear += 1
    assert clear > 0.7 * len(PROMPTS) * NEW_TOKENS  # the check above was not empty


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-3)])
def test_perplexity(dtype: str, tolerance: float, request: pytest.FixtureRequest) -> None:
    """8 chunks of 1,024 tokens. bfloat16 is held to the float32 reference as well."""
    engine: Engine = request.getfixturevalue(dtype)
    ids, chunk = GOLDEN["perplexity"]["ids"], GOLDEN["perplexity"]["chunk"]
    chunks = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    assert len(chunks) == 8
    nll = [prompt_nll(output) for output in engine.generate(chunks, greedy(1, prompt_logprobs=0))]
    perplexity = math.exp(np.concatenate(nll).mean())
    assert perplexity == pytest.approx(GOLDEN["perplexity"]["f32"]["ppl"], rel=tolerance)
    if dtype == "bfloat16":
        assert perplexity == pytest.approx(GOLDEN["perplexity"]["bf16"]["ppl"], rel=tolerance)
    else:
        reference = GOLDEN["perplexity"]["f32"]["chunk_mean_nll"]
        np.testing.assert_allclose([n.mean() for n in nll], reference, rtol=0, atol=1e-4)
