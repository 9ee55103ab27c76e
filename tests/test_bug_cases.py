"""Public failures of engines like this one, replayed. One test for each; its first line says what is right.

The numbers are those of the project's list of such reports. Cases that concern one part alone (tokenizer,
block allocator, scheduler, kernels, safetensors, packaging) are tested with that part.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import pytest
from helpers import (
    check_all_blocks_are_back,
    exact,
    finish,
    greedy,
    open_engine,
    prompt_of,
    python_process,
    solo,
    tokens_of,
)
from tiny_vllm.engine import Engine
from tiny_vllm.errors import Error, InvalidRequestError, ModelLoadError, OutOfMemoryError
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams

V = 512  # the vocabulary of the models below


# ---- class 1: tokenizer and detokenizer --------------------------------------------------------------------


def test_b01_one_token_carries_half_a_character(tmp_path: Path) -> None:
    """Right: whole text and joined pieces are the UTF-8 of all bytes; logprobs have each token's bytes."""
    said = "é你🌶ok"
    pieces = [b"\xc3", b"\xa9\xe4\xbd\xa0", b"\xf0\x9f", b"\x8c", b"\xb6o", b"k"]
    assert b"".join(pieces) == said.encode()
    engine = open_engine(fixtures.write_text_chain(tmp_path, pieces))
    start = [fixtures.CHAIN_START]

    output = engine.generate(start, greedy(logprobs=1))[0].outputs[0]
    assert (output.text, output.finish_reason) == (said, "stop")
    assert output.logprobs is not None
    chosen = [row[token] for row, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert [entry.decoded_bytes for entry in chosen[:-1]] == pieces

    assert list(engine.stream(start, greedy())) == ["é你", "🌶o", "k"]
    texts = [o.outputs[0].text for o in engine.start_stream(start, greedy())]
    assert texts == ["", "é你", "é你", "é你", "é你🌶o", said, said]

    # Cut in the middle of a character, the text says so, once, at the end.
    assert engine.generate(start, greedy(3))[0].outputs[0].text == "é你\ufffd"
    assert list(engine.stream(start, greedy(3))) == ["é你", "\ufffd"]
    # A character that the prompt left unfinished belongs to the output.
    assert engine.generate([*start, 0xC3], greedy())[0].outputs[0].text == said


@pytest.mark.parametrize(
    ("template", "add_bos", "chat", "plain"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", True, "<s>hi", "<s>hi"),
        ("{{ messages[0].content }}", True, "hi", "<s>hi"),
        ("{{ bos_token }}{{ messages[0].content }}", False, "<s>hi", "hi"),
    ],
    ids=["template and tokenizer", "tokenizer only", "template only"],
)
def test_b04_begin_token_once(template: str, add_bos: bool, chat: str, plain: str, tmp_path: Path) -> None:
    """Right: the ids of a chat are those of the template's text alone; a completion begins as the tokenizer
    says.
    """
    fixtures.write_fixed(tmp_path, [0.0] * 300)
    fixtures.write_byte_tokenizer(
        tmp_path, special=["<s>", "</s>"], bos="<s>", eos="</s>", add_bos=add_bos, chat_template=template
    )
    engine = open_engine(tmp_path)
    ids = {"<s>hi": [256, *b"hi"], "hi": [*b"hi"]}
    messages = [{"role": "user", "content": "hi"}]
    assert engine.chat(messages, greedy(1))[0].prompt_token_ids == ids[chat]
    assert next(engine.start_stream(messages, greedy(1))).prompt_token_ids == ids[chat]
    assert engine.generate("hi", greedy(1))[0].prompt_token_ids == ids[plain]
    assert next(engine.start_stream("hi", greedy(1))).prompt_token_ids == ids[plain]


# ---- class 2: sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1, 100])
def test_b07_greedy_by_every_road(scale: int, dtype: str, tmp_path: Path) -> None:
    """Right: temperature 0, top_k=1 and tiny top_p always take the lowest tied id; tiny temperatures take a
    tied one.
    """
    logits = np.linspace(-3, 20, 32)
    logits[[7, 9]] = 30
    engine = open_engine(fixtures.write_fixed(tmp_path, logits * scale), dtype=dtype)
    one = {"max_tokens": 50, "ignore_eos": True}
    strict = [
        SamplingParams(temperature=0.0, **one),
        SamplingParams(temperature=0.0, top_p=0.5, top_k=9, **one),
        SamplingParams(temperature=1.0, top_k=1, **one),
        SamplingParams(top_p=1e-6, **one),
    ]
    tiny = [SamplingParams(temperature=t, seed=3, **one) for t in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)]
    together = engine.generate([[1]] * 9, strict + tiny)
    singly = [engine.generate([1], params)[0] for params in strict + tiny]
    for outputs in (together, singly):
        for output in outputs[:4]:
            assert set(tokens_of(output)) == {7}
        for output in outputs[4:]:
            assert set(tokens_of(output)) == {7, 9}
    with pytest.raises(InvalidRequestError, match="top_p"):
        SamplingParams(top_p=0)


def test_b10_penalties_count_the_right_tokens(tmp_path: Path) -> None:
    """Right: repetition covers prompt and output, once; presence and frequency the output only; whoever is
    beside such a request has nothing of it; 1.0 and 0.0 change nothing.

    Greedy: what is chosen shows to within 0.01 where a logit has gone, for the rival's is planted there.
    """
    prompt, mate_prompt = [7, 8, 7], [7, 8] * 20

    def run(name: str, planted: dict[int, float], max_tokens: int = 1, **penalties: float) -> list[int]:
        logits = np.full(16, -9.0)
        logits[list(planted)] = list(planted.values())
        engine = open_engine(fixtures.write_fixed(tmp_path / name, logits))
        alone = [engine.generate(mate_prompt, greedy(5, logprobs=16))[0]]
        params = greedy(max_tokens, ignore_eos=True, **penalties)
        together = engine.generate([prompt, mate_prompt], [params, greedy(5, logprobs=16)])
        assert exact(together[1]) == exact(alone[0])
        return tokens_of(together[0])

    assert run("r1", {7: 4, 9: 1.99}, repetition_penalty=2.0) == [7]  # 4 becomes 2, once
    assert run("r2", {7: 4, 9: 2.01}, repetition_penalty=2.0) == [9]
    assert run("r3", {8: -4, 9: -8.01}, repetition_penalty=2.0) == [8]  # -4 becomes -8, once
    assert run("r4", {8: -4, 9: -7.99}, repetition_penalty=2.0) == [9]
    # 3 is not in the prompt: 4 when it is chosen first, 2 from then on.
    assert run("r5", {3: 4, 9: 1.99}, 3, repetition_penalty=2.0) == [3, 3, 3]
    assert run("r6", {3: 4, 9: 2.01}, 3, repetition_penalty=2.0) == [3, 9, 3]

    # What is in the prompt alone costs nothing. Then 4, 3, 3, ... and 4, 3, 2, ...
    assert run("p1", {7: 4, 9: 3.99}, presence_penalty=1.0) == [7]
    assert run("p2", {7: 4, 9: 2.99}, 4, presence_penalty=1.0) == [7, 7, 7, 7]
    assert run("f1", {7: 4, 9: 3.99}, frequency_penalty=1.0) == [7]
    assert run("f2", {7: 4, 9: 2.01}, 4, frequency_penalty=1.0) == [7, 7, 9, 7]
    assert run("f3", {7: 4, 9: 1.99}, 4, frequency_penalty=1.0) == [7, 7, 7, 9]

    engine = open_engine(fixtures.write_fixed(tmp_path / "none", np.linspace(-3, 2, 16)))
    plain = SamplingParams(seed=1, max_tokens=50, logprobs=3)
    none = SamplingParams(
        seed=1,
        max_tokens=50,
        logprobs=3,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=-0.0,
    )
    assert exact(engine.generate(prompt, none)[0]) == exact(engine.generate(prompt, plain)[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"abc": 5}),
        ("stop", [""]),
        ("stop", ["a", ""]),
        ("stop", 7),
        ("stop", [7]),
        ("best_of", 2),
        ("use_beam_search", True),
    ],
)
def test_b12_b13_what_is_not_there_is_refused(field: str, value: Any) -> None:
    """Right: what is unknown or makes no sense is refused by name, never accepted and ignored."""
    with pytest.raises(InvalidRequestError, match=field):
        SamplingParams(**{field: value})


def test_b11_ids_and_counts_outside_the_vocabulary(rand_folder: Path) -> None:
    """Right: each is refused alone; the healthy request ends unchanged; log probabilities are finite."""
    engine = open_engine(rand_folder)
    engine.add_request("healthy", [1, 2, 3], greedy(20))
    bad: list[tuple[Any, dict[str, Any], str]] = [
        ([1], {"logprobs": V + 1}, "logprobs"),
        ([1], {"logprobs": 1_000_000}, "logprobs"),
        ([1], {"prompt_logprobs": V + 1}, "prompt_logprobs"),
        ([1], {"stop_token_ids": [V]}, "stop_token_ids"),
        ([-1], {}, "-1"),
        ([V], {}, "512"),
        ([1, 2**31], {}, str(2**31)),
        ([1, 2**70], {}, str(2**70)),
        ([1.0], {}, "1.0"),
        ([True], {}, "True"),
        (["a"], {}, "'a'"),
    ]
    for i, (prompt, fields, message) in enumerate(bad):
        engine.step()
        with pytest.raises(InvalidRequestError, match=message):
            engine.add_request(f"bad {i}", prompt, SamplingParams(**fields))
    last = finish(engine)
    assert list(last) == ["healthy"]
    assert exact(last["healthy"]) == exact(solo(rand_folder, [[1, 2, 3]], greedy(20))[0])

    output = engine.generate([1], SamplingParams(top_k=1, logprobs=5, max_tokens=4))[0].outputs[0]
    assert output.logprobs is not None
    json.dumps([[entry.logprob for entry in row.values()] for row in output.logprobs], allow_nan=False)
    whole = engine.generate([1], greedy(1, logprobs=V))[0].outputs[0]  # all of the vocabulary is allowed
    assert whole.logprobs is not None
    assert len(whole.logprobs[0]) == V


# ---- class 3: stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "text", "stop_reason"),
    [
        (["a bet"], "alph", "a bet"),
        ("a bet", "alph", "a bet"),
        (["ga", "a b"], "alph", "a b"),
        (["mma"], "alpha beta ga", "mma"),
        ([], "alpha beta gamma", None),
        (None, "alpha beta gamma", None),
        ([f"{i} beta" for i in range(9)] + ["ta g"], "alpha be", "ta g"),
        (["PROMPT"], "alpha beta gamma", None),
    ],
)
def test_b13_stop_text_that_does_not_match_token_edges(
    stop: Any, text: str, stop_reason: str | None, tmp_path: Path
) -> None:
    """Right: cut before the earliest stop text; nothing of it is streamed; the prompt's does not count."""
    engine = open_engine(fixtures.write_text_chain(tmp_path, [b"al", b"pha be", b"ta ga", b"mma"]))
    prompt = [*b"PROMPT", fixtures.CHAIN_START]
    params = greedy(stop=stop)
    output = engine.generate(prompt, params)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", stop_reason)
    assert "".join(engine.stream(prompt, params)) == text
    assert all(text.startswith(o.outputs[0].text) for o in engine.start_stream(prompt, params))
    check_all_blocks_are_back(engine)


@pytest.mark.parametrize(
    ("config_eos", "generation_config"),
    [
        (300, {"eos_token_id": [300, 301, 302]}),  # as Llama 3 does
        ([300, 301, 302], {}),  # the list is in config.json only
        ([300, 301, 302], None),  # there is no generation_config.json
        (..., {"eos_token_id": [301, 302]}),  # config.json does not have the key
        (None, {"eos_token_id": 302}),  # it is null
    ],
    ids=["both", "config only", "no generation_config", "absent", "null"],
)
def test_b15_several_end_ids(
    config_eos: Any, generation_config: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Right: each listed id ends the output with "stop"; token_ids has it, the text does not."""
    letters = list(b"abc")
    fixtures.write_chain(tmp_path, [*letters, 302, *b"def"], eos=config_eos)
    fixtures.write_byte_tokenizer(tmp_path, special=[f"<|{i}|>" for i in range(256, 320)], eos="<|300|>")
    if generation_config is not None:
        fixtures.write_json(tmp_path / "generation_config.json", generation_config)
    engine = open_engine(tmp_path)
    output = engine.generate([fixtures.CHAIN_START], greedy())[0].outputs[0]
    assert output.token_ids == [*letters, 302]
    assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "stop", None)
    assert "".join(engine.stream([fixtures.CHAIN_START], greedy())) == "abc"
    beyond = engine.generate([fixtures.CHAIN_START], greedy(6, ignore_eos=True))[0].outputs[0]
    assert beyond.token_ids == [*letters, 302, *b"de"]
    assert beyond.text == "abcde"


def test_b15_only_the_tokenizer_knows_the_end(tmp_path: Path) -> None:
    """Right: when neither file names an end id, the tokenizer's end token ends the output."""
    fixtures.write_chain(tmp_path, [*b"abc", 256, *b"def"], eos=...)
    fixtures.write_byte_tokenizer(tmp_path, special=["<end>"], eos="<end>")
    output = open_engine(tmp_path).generate([fixtures.CHAIN_START], greedy())[0].outputs[0]
    assert (output.text, output.finish_reason) == ("abc", "stop")


@pytest.mark.parametrize("scheduler", ["continuous", "static"])
@pytest.mark.parametrize("caching", [True, False])
def test_b17_a_prompt_as_long_as_the_model(scheduler: str, caching: bool, rand_folder: Path) -> None:
    """Right: M-1 tokens leave room for one, M are refused with both numbers, 0 is refused, None runs to M."""
    M = 64
    engine = open_engine(rand_folder, max_model_len=M, scheduler=scheduler, enable_prefix_caching=caching)
    for length in (1, M - 2, M - 1):
        for max_tokens in (1, 2, 1000, 2**63 - 1, None):
            expected = min(max_tokens or M, M - length)
            output = engine.generate(prompt_of(length), SamplingParams(max_tokens=max_tokens))[0].outputs[0]
            assert (len(output.token_ids), output.finish_reason) == (expected, "length")
    for length in (M, M + 1, 10 * M):
        with pytest.raises(InvalidRequestError, match=rf"{length} tokens.*{M}"):
            engine.generate(prompt_of(length), greedy(1))
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    assert len(tokens_of(engine.generate([1], greedy(5))[0])) == 5
    check_all_blocks_are_back(engine)


# ---- class 4: paged KV -------------------------------------------------------------------------------------

B20_PROMPTS = [1, 15, 16, 17, 31, 32, 33, 48]
B20_MAX_TOKENS = [1, 2, 15, 16, 17, 18]


@pytest.fixture(scope="module")
def b20_expected(rand_folder: Path) -> dict[int, list[int]]:
    """18 greedy tokens of each prompt, alone. test_transformers_live.py compares them with transformers."""
    outputs = solo(rand_folder, [prompt_of(n, seed=n) for n in B20_PROMPTS], greedy(18))
    return {n: tokens_of(output) for n, output in zip(B20_PROMPTS, outputs, strict=True)}


@pytest.mark.parametrize(
    ("caching", "scheduler"), [(False, "continuous"), (True, "continuous"), (True, "static")]
)
def test_b20_every_length_around_a_block_edge(
    caching: bool, scheduler: str, rand_folder: Path, b20_expected: dict[int, list[int]]
) -> None:
    """Right: the same tokens in every cell, in a pool that is just large enough; one block less shortens or
    refuses.
    """
    engines: dict[int, Engine] = {}
    for length in B20_PROMPTS:
        for max_tokens in B20_MAX_TOKENS:
            prompt, expected = prompt_of(length, seed=length), b20_expected[length][:max_tokens]
            blocks = (length + max_tokens + 15) // 16
            for short in (0, 1):
                capacity = 16 * (blocks - short)
                if capacity == 0:
                    continue
                engine = engines.setdefault(
                    capacity,
                    open_engine(
                        rand_folder,
                        num_blocks=capacity // 16,
                        enable_prefix_caching=caching,
                        scheduler=scheduler,
                    ),
                )
                room = capacity - length
                if room < 1:
                    with pytest.raises(InvalidRequestError, match=f"prompt has {length} tokens"):
                        engine.generate(prompt, greedy(max_tokens))
                    continue
                outputs = engine.generate(
                    [prompt, prompt], greedy(max_tokens)
                )  # and a second one, that has to wait
                for output in outputs:
                    assert tokens_of(output) == expected[:room], (length, max_tokens, short)
                    assert output.outputs[0].finish_reason == "length"
                check_all_blocks_are_back(engine)


def test_b21_a_recycled_block_does_not_answer_for_its_old_content(rand_folder: Path) -> None:
    """Right: after all blocks were recycled the first prompt is a miss, and gives what it gave first."""
    engine = open_engine(rand_folder, num_blocks=4)
    a, b = prompt_of(32, seed=1), prompt_of(63, seed=2)
    first = engine.generate(a, greedy(16, logprobs=2))[0]
    assert engine.generate(a, greedy(16, logprobs=2))[0].num_cached_tokens == 16  # the cache is on
    hits = engine.metrics()["prefix_cache_hit_tokens"]
    other = engine.generate(b, greedy(1, logprobs=2))[0]
    again = engine.generate(a, greedy(16, logprobs=2))[0]
    assert (other.num_cached_tokens, again.num_cached_tokens) == (0, 0)
    assert engine.metrics()["prefix_cache_hit_tokens"] == hits
    assert exact(again) == exact(first)
    assert exact(other) == exact(solo(rand_folder, [b], greedy(1, logprobs=2))[0])
    check_all_blocks_are_back(engine)


def test_b22_equal_blocks_of_different_texts(rand_folder: Path) -> None:
    """Right: a block is reused only with all that stands before it, at the same place."""
    x, y, z = (prompt_of(16, seed=i) for i in range(3))
    end = prompt_of(3, seed=9)
    cases = [
        (x + y + end, 0),
        (z + y + end, 0),
        (y + end, 0),
        (y + x + end, 16),
        (x + y + x + end, 32),
        (x + x + end, 16),
    ]
    engine = open_engine(rand_folder)
    expected = solo(rand_folder, [prompt for prompt, _ in cases], greedy(8, logprobs=2))
    for (prompt, cached), alone in zip(cases, expected, strict=True):
        output = engine.generate(prompt, greedy(8, logprobs=2))[0]
        assert output.num_cached_tokens == cached
        assert exact(output) == exact(alone)


@pytest.mark.parametrize("length", [20, 16])
def test_b23_n_outputs_of_one_prompt(length: int, rand_folder: Path) -> None:
    """Right: all indices are there, children differ and repeat, in a pool that preempts as well; greedy ones
    agree.
    """
    prompts = [prompt_of(length, seed=1), prompt_of(length, seed=2)]
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=30, logprobs=1)
    roomy = open_engine(rand_folder)
    first = roomy.generate(prompts, params)
    for output in first:
        assert [c.index for c in output.outputs] == [0, 1, 2]
        assert len({tuple(c.token_ids) for c in output.outputs}) == 3
        assert all(len(c.token_ids) == 30 for c in output.outputs)
    # A half-filled block is copied before the first two of three write to it; a full one never is.
    assert roomy.metrics()["num_block_copies"] == (2 * 2 if length == 20 else 0)
    check_all_blocks_are_back(roomy)

    tight = open_engine(rand_folder, num_blocks=12)
    for engine in (roomy, tight):
        assert [exact(o) for o in engine.generate(prompts, params)] == [exact(o) for o in first]
        check_all_blocks_are_back(engine)
    assert tight.metrics()["num_preemptions"] > 0

    (same,) = roomy.generate(prompts[0], greedy(10, n=3))
    assert same.outputs[0].token_ids == same.outputs[1].token_ids == same.outputs[2].token_ids


def test_b23_aborting_a_request_with_children(rand_folder: Path) -> None:
    """Right: abort ends all of them, in the middle of whatever they do, and all blocks come back."""
    for steps in range(6):
        engine = open_engine(rand_folder, max_num_batched_tokens=10)
        engine.add_request("x", prompt_of(20), SamplingParams(n=3, max_tokens=30))
        for _ in range(steps):
            engine.step()
        engine.abort_request("x")
        assert engine.step() == []
        check_all_blocks_are_back(engine)


# ---- class 5: scheduler ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["continuous", "static"])
def test_b24_a_request_that_can_never_fit(scheduler: str, rand_folder: Path) -> None:
    """Right: it is refused at once with need and capacity; the others finish; one that outgrows the pool
    ends.
    """
    engine = open_engine(rand_folder, num_blocks=10, scheduler=scheduler)
    a, b, c = prompt_of(50, seed=1), prompt_of(200, seed=2), prompt_of(50, seed=3)
    engine.add_request("a", a, greedy(20))
    with pytest.raises(InvalidRequestError, match=r"200 tokens.*160.*10 blocks"):
        engine.add_request("b", b, greedy(20))
    engine.add_request("c", c, greedy(20))
    last = finish(engine)
    assert [exact(last["a"]), exact(last["c"])] == [exact(o) for o in solo(rand_folder, [a, c], greedy(20))]

    d = engine.generate(prompt_of(100), greedy(100))[0].outputs[0]
    assert (len(d.token_ids), d.finish_reason) == (60, "length")
    assert engine.metrics()["num_preemptions"] == 0
    check_all_blocks_are_back(engine)

    outputs = engine.generate([a, b, c], greedy(20))
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert "200" in str(outputs[1].outputs[0].stop_reason)
    assert [tokens_of(outputs[0]), tokens_of(outputs[2])] == [tokens_of(last["a"]), tokens_of(last["c"])]


def test_b24_a_prompt_above_the_budget_without_chunks(rand_folder: Path) -> None:
    """Right: with chunks it runs; without, a budget below max_model_len is refused when the engine starts."""
    prompt = prompt_of(100)
    expected = tokens_of(solo(rand_folder, [prompt], greedy(4))[0])
    chunked = open_engine(rand_folder, max_num_batched_tokens=32)
    assert tokens_of(chunked.generate(prompt, greedy(4))[0]) == expected
    with pytest.raises(InvalidRequestError, match=r"max_num_batched_tokens is 32.*max_model_len \(1024\)"):
        open_engine(rand_folder, max_num_batched_tokens=32, enable_chunked_prefill=False)
    whole = open_engine(
        rand_folder, max_num_batched_tokens=128, max_model_len=128, enable_chunked_prefill=False
    )
    outputs = whole.generate([prompt, prompt[:90], prompt], greedy(4))
    assert tokens_of(outputs[0]) == tokens_of(outputs[2]) == expected


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model small enough for thousands of tokens."""
    return fixtures.write_rand(
        tmp_path_factory.mktemp("long"),
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        num_hidden_layers=1,
        max_position_embeddings=8192,
    )


BUDGET = 64


def steps_until(engine: Engine, done: Any, log: list[dict[str, RequestOutput]]) -> None:
    """Steps until done(), checking the budget of each; log gets what each step reported."""
    before = engine.metrics()
    for _ in range(5000):
        if done():
            return
        log.append({o.request_id: o for o in engine.step()})
        now = engine.metrics()
        tokens, steps = (now[name] - before[name] for name in ("num_computed_tokens", "num_steps"))
        assert tokens <= BUDGET * steps  # a call may start two steps, one ahead
        before = now
    raise AssertionError("5,000 steps and no end")


def test_b25_one_long_prompt_does_not_stop_the_others(long_folder: Path) -> None:
    """Right: who decodes gets a token in each step; a short prompt gets its first token before the long one
    does.
    """
    engine = open_engine(long_folder, num_blocks=400, max_num_batched_tokens=BUDGET)
    log: list[dict[str, RequestOutput]] = []
    engine.add_request("r", [1, 2, 3], greedy(500))
    steps_until(engine, lambda: len(log) == 3, log)
    engine.add_request("l", prompt_of(4000), greedy(1))
    steps_until(engine, lambda: len(log) == 5, log)
    engine.add_request("s", prompt_of(5, seed=1), greedy(1))
    steps_until(engine, lambda: any("l" in step for step in log), log)
    first = {name: next(i for i, step in enumerate(log) if name in step) for name in ("s", "l")}
    assert first["s"] < 10 < 60 < first["l"]
    assert all("r" in step for step in log)
    engine.abort_request("r")
    check_all_blocks_are_back(engine)


def test_b25_a_long_prompt_gets_its_turn(long_folder: Path) -> None:
    """Right: while 400 short requests keep arriving, it ends within the bound of continuous_batching.cpp: an
    eighth of the budget in each step.
    """
    engine = open_engine(long_folder, num_blocks=400, max_num_batched_tokens=BUDGET, max_num_seqs=16)
    log: list[dict[str, RequestOutput]] = []
    engine.add_request("l", prompt_of(1500), greedy(1))
    for i in range(200):
        for j in range(2):
            engine.add_request(f"s{i}-{j}", prompt_of(30, seed=2 * i + j), greedy(2))
        steps_until(engine, lambda wanted=i + 1: len(log) == wanted, log)
    steps_until(engine, lambda: not engine.has_unfinished_requests(), log)
    ended = next(i for i, step in enumerate(log) if "l" in step)
    assert ended <= -(-1500 // (BUDGET // 8)) + 1
    assert len({name for step in log for name in step}) == 401
    check_all_blocks_are_back(engine)


def test_b26_the_same_request_id_twice(rand_folder: Path) -> None:
    """Right: the second is refused, the first is unchanged; an id is free after its end; odd aborts do
    nothing.
    """
    engine = open_engine(rand_folder)
    alone = [exact(o) for o in solo(rand_folder, [[1, 2], [3, 4]], greedy(8))]
    engine.add_request("x", [1, 2], greedy(8))
    engine.step()
    with pytest.raises(InvalidRequestError, match="'x' is in use"):
        engine.add_request("x", [3, 4], greedy(8))
    engine.abort_request("unknown")
    assert exact(finish(engine)["x"]) == alone[0]
    engine.abort_request("x")  # it has ended
    engine.add_request("x", [3, 4], greedy(8))
    assert exact(finish(engine)["x"]) == alone[1]
    engine.add_request("x", [1, 2], greedy(8))
    engine.step()
    engine.abort_request("x")
    engine.abort_request("x")
    assert not engine.has_unfinished_requests()
    engine.add_request("x", [3, 4], greedy(8))
    assert exact(finish(engine)["x"]) == alone[1]
    with pytest.raises(InvalidRequestError, match="request_id"):
        engine.add_request(7, [1], greedy(1))  # type: ignore[arg-type]
    check_all_blocks_are_back(engine)


def test_b27_nothing_to_compute(tmp_path: Path) -> None:
    """Right: zero ids are refused for that request alone; with a begin token "" is one token."""
    fixtures.write_fixed(tmp_path / "plain", [0.0] * 300)
    fixtures.write_byte_tokenizer(
        tmp_path / "plain", special=["<s>"], bos="<s>", chat_template="{{ messages[0].content }}"
    )
    fixtures.write_fixed(tmp_path / "bos", [0.0] * 300)
    fixtures.write_byte_tokenizer(tmp_path / "bos", special=["<s>"], bos="<s>", add_bos=True)

    plain = open_engine(tmp_path / "plain")
    for prompt in ("", [[]], {"prompt": ""}, {"prompt_token_ids": []}, ["", ""], ["", []]):
        with pytest.raises(InvalidRequestError, match="no tokens"):
            plain.generate(prompt, greedy(2))
    assert plain.generate([], greedy(2)) == []
    refused, fine = plain.generate(["", "hi"], greedy(2))
    assert (refused.outputs[0].finish_reason, refused.outputs[0].token_ids) == ("error", [])
    assert refused.finished
    assert "no tokens" in str(refused.outputs[0].stop_reason)
    assert (fine.outputs[0].finish_reason, len(tokens_of(fine))) == ("length", 2)
    assert plain.generate(" \n", greedy(2))[0].prompt_token_ids == [32, 10]
    for messages in ([], [[]], [{"role": "user", "content": ""}]):
        with pytest.raises(InvalidRequestError):
            plain.chat(messages, greedy(2))  # type: ignore[arg-type]
    check_all_blocks_are_back(plain)

    bos = open_engine(tmp_path / "bos")
    assert bos.generate("", greedy(2))[0].prompt_token_ids == [256]
    assert [o.prompt_token_ids for o in bos.generate(["", "hi"], greedy(2))] == [[256], [256, *b"hi"]]
    with pytest.raises(InvalidRequestError, match="no tokens"):
        bos.generate([[]], greedy(2))


# ---- class 6: numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b33_logits_that_are_not_numbers(dtype: str, tmp_path: Path) -> None:
    """Right: that request ends with "error" and says why; its batch mates and whoever gets its blocks do not
    notice.
    """
    poison = 5
    config = fixtures.RAND
    tensors = fixtures.random_tensors(config)
    tensors["model.embed_tokens.weight"][poison] = np.nan
    tensors["lm_head.weight"][poison] = 0  # nobody says it
    fixtures.write_model(tmp_path, config, tensors, dtype)
    fixtures.write_byte_tokenizer(tmp_path)
    healthy = [[7, 8, 9], [t for t in prompt_of(40) if t != poison]]
    params = SamplingParams(seed=1, max_tokens=12, logprobs=1)
    alone = [exact(o) for o in solo(tmp_path, healthy, params, dtype=dtype)]

    # 7 blocks: the next request gets those that hold the NaN keys and values, and fills them in part only.
    engine = open_engine(tmp_path, dtype=dtype, num_blocks=7, enable_prefix_caching=False)
    for sick in ([1, poison, 2], [*prompt_of(20, seed=3), poison], [poison] * 30):
        outputs = engine.generate([healthy[0], sick, healthy[1]], params)
        failed = outputs[1].outputs[0]
        assert (failed.token_ids, failed.finish_reason) == ([], "error")
        assert "NaN" in str(failed.stop_reason)
        assert [exact(outputs[0]), exact(outputs[2])] == alone
        check_all_blocks_are_back(engine)
        for prompt, expected in zip(healthy, alone, strict=True):
            assert exact(engine.generate(prompt, params)[0]) == expected

    # Who sees the poison through attention alone, 32 keys of nothing else or one among many, has no answer.
    engine = open_engine(tmp_path, dtype=dtype, num_blocks=40)
    for count in (32, 1):
        output = engine.generate([poison] * count + healthy[1] * 2, params)[0].outputs[0]
        assert (output.token_ids, output.finish_reason) == ([], "error")

    # What comes before the poison is as it was, also for those who find it in the prefix cache.
    before = healthy[1][:32]
    assert engine.generate([*before, poison], params)[0].outputs[0].finish_reason == "error"
    after = engine.generate([*before, 9], params)[0]
    assert after.num_cached_tokens == 32
    assert after.outputs[0].finish_reason == "length"
    shown = engine.generate([*before, poison, 3], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert shown.outputs[0].finish_reason == "error"
    rows = [next(iter(row.values())).logprob for row in shown.prompt_logprobs[1:]]  # type: ignore[index, union-attr]
    assert np.isfinite(rows[:32]).all()
    assert not np.isfinite(rows[32])

    both = engine.generate([poison], SamplingParams(n=2, prompt_logprobs=1, max_tokens=4))[0]
    assert [c.finish_reason for c in both.outputs] == ["error", "error"]
    with pytest.raises(Error, match="NaN"):
        list(engine.stream([1, poison], params))
    check_all_blocks_are_back(engine)


# ---- class 7: weights --------------------------------------------------------------------------------------


def test_b36_lm_head_there_or_not(tmp_path: Path) -> None:
    """Right: tied models use the embedding whatever the file has; an untied one without lm_head is refused by
    name.
    """
    tied, untied = ({**fixtures.RAND, "tie_word_embeddings": tie} for tie in (True, False))
    silent = {key: value for key, value in tied.items() if key != "tie_word_embeddings"}
    tensors = fixtures.random_tensors(untied)
    without = {name: t for name, t in tensors.items() if name != "lm_head.weight"}
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32)}

    def run(name: str, config: dict[str, Any], weights: fixtures.Tensors) -> list[int]:
        folder = fixtures.write_model(tmp_path / name, config, weights)
        return tokens_of(open_engine(folder).generate([1, 2, 3], greedy(8))[0])

    expected = run("tied", tied, without)
    with pytest.warns(UserWarning, match=r"lm_head\.weight"):
        assert run("tied, another lm_head in the file", tied, tensors) == expected
    assert run("untied", untied, tensors) != expected
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        run("untied without", untied, without)
    # The family's default is untied.
    assert run("no key", silent, tensors) == run("untied again", untied, tensors)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        run("no key without", silent, without)
    with pytest.warns(UserWarning, match="inv_freq"):
        assert run("an extra tensor", tied, {**without, **extra}) == expected


def test_b39_head_dim_is_not_hidden_by_heads(tmp_path: Path) -> None:
    """Right: null and absent mean hidden / heads; weights that disagree are refused with both numbers."""
    derived = {**fixtures.RAND, "head_dim": 32}  # 256 / 8
    tensors = fixtures.random_tensors(derived)

    def run(name: str, config: dict[str, Any]) -> list[Any]:
        folder = fixtures.write_model(tmp_path / name, config, tensors)
        return exact(open_engine(folder).generate(prompt_of(20), greedy(8, logprobs=3))[0])

    expected = run("stated", derived)
    assert run("null", {**derived, "head_dim": None}) == expected
    assert run("absent", {k: v for k, v in derived.items() if k != "head_dim"}) == expected
    with pytest.raises(ModelLoadError, match=r"q_proj.*256, 256.*512, 256"):
        run("disagreeing", {**derived, "head_dim": 64})


# ---- class 8: the device -----------------------------------------------------------------------------------


@pytest.mark.cpu_only  # CUDA cannot be used in the child of a fork
def test_b42_fork_with_a_running_thread_pool(rand_folder: Path) -> None:
    """Right: a forked child can build an engine, use the parent's, and tokenize; the parent goes on."""
    script = f"""
import os, signal
from pathlib import Path
from helpers import greedy, open_engine, tokens_of
signal.alarm(60)
folder = Path({str(rand_folder)!r})

def in_child(work):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work() else 1)
    assert os.waitpid(pid, 0)[1] == 0, work

engine = open_engine(folder, num_threads=3)
prompt = list(range(100))
expected = tokens_of(engine.generate(prompt, greedy(8))[0])
in_child(lambda: tokens_of(engine.generate(prompt, greedy(8))[0]) == expected)
in_child(lambda: tokens_of(open_engine(folder, num_threads=3).generate(prompt, greedy(8))[0]) == expected)
in_child(lambda: engine.tokenizer.encode("hi") == [104, 105])
assert tokens_of(engine.generate(prompt, greedy(8))[0]) == expected
print("fine")
"""
    result = subprocess.run(python_process(script), capture_output=True, text=True, timeout=120)
    assert result.stdout == "fine\n", result.stderr


@pytest.mark.cpu_only  # it is the size of the main memory that it exceeds
def test_b43_more_memory_than_there_is(rand_folder: Path, tmp_path: Path) -> None:
    """Right: an error with wanted and available memory; what it took is back, and the next start works."""
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for wanted in (2 * ram, 2**50):
        with pytest.raises(
            OutOfMemoryError, match=r"wanted \d+ MiB.* \d+ MiB are available; lower kv_cache_memory_bytes"
        ):
            open_engine(rand_folder, kv_cache_memory_bytes=wanted)
    with pytest.raises(
        OutOfMemoryError, match="kv_cache_memory_bytes is 100, but one block of 16 tokens takes 32768 bytes"
    ):
        open_engine(rand_folder, kv_cache_memory_bytes=100)
    # Weights that no machine has room for: 4 TiB from a config.json alone.
    huge = fixtures.llama_config(
        hidden_size=2**15, intermediate_size=2**17, num_hidden_layers=256, vocab_size=2**17
    )
    fixtures.write_json(tmp_path / "config.json", huge)
    with pytest.raises(OutOfMemoryError, match="wanted"):
        Engine(tmp_path, device="cpu", load_format="dummy")
    assert len(tokens_of(open_engine(rand_folder).generate([1], greedy(3))[0])) == 3


# ---- class 10: building and packaging ----------------------------------------------------------------------


def test_b57_odd_paths(rand_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right: letters of any script, spaces, relative paths and symlinks name a model as well as any other
    path.
    """
    expected = tokens_of(open_engine(rand_folder).generate("hi", greedy(5))[0])
    odd = tmp_path / "модель é 模型"
    fixtures.write_rand(odd)
    fixtures.write_byte_tokenizer(odd)
    (tmp_path / "link").symlink_to(odd, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    for model in (odd, str(odd), Path(odd.name), f"./{odd.name}/", tmp_path / "link", "link/../link"):
        engine = Engine(model, device="cpu", dtype="float32", kv_cache_memory_bytes=2**20)
        assert tokens_of(engine.generate("hi", greedy(5))[0]) == expected


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("order", ["torch, tiny_vllm", "tiny_vllm, torch"])
def test_b57_torch_before_and_after(order: str, rand_folder: Path) -> None:
    """Right: with torch in the process, whichever came first, the output is the same, and torch works."""
    expected = tokens_of(open_engine(rand_folder).generate("hi", greedy(5))[0])
    script = f"""
import {order}
from pathlib import Path
from helpers import greedy, open_engine, tokens_of
torch.set_num_threads(2)
assert float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()) == 300**3
print(tokens_of(open_engine(Path({str(rand_folder)!r})).generate("hi", greedy(5))[0]))
assert float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()) == 300**3
"""
    result = subprocess.run(python_process(script), capture_output=True, text=True, timeout=300)
    assert result.stdout == f"{expected}\n", result.stderr
