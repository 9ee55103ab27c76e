"""Any mix of requests in any engine: each gets what it gets alone, ends once, and leaves nothing behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import fixtures
import pytest
from helpers import DEVICE, check_all_blocks_are_back, exact, open_engine, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vllm import RequestOutputKind
from tiny_vllm.engine import Engine
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams

M = 64  # max_model_len
LETTERS = b"abcdefghijklmnop"
ENDS = [*b"p"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RAND that says some letters most of the time; one of these ends its outputs.

    All other logits are 0, so that ties among them are ties on every device.
    """
    config = {**fixtures.RAND, "eos_token_id": ENDS}
    tensors = fixtures.random_tensors(config)
    head = tensors["lm_head.weight"]
    letters = 2.5 * head[list(LETTERS)]
    head[:] = 0
    head[list(LETTERS)] = letters
    folder = fixtures.write_model(tmp_path_factory.mktemp("letters"), config, tensors)
    fixtures.write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def one(folder: Path) -> Engine:
    """Runs one request at a time, in a huge pool and without a prefix cache."""
    return open_engine(folder, max_model_len=M, enable_prefix_caching=False)


# ---- what may come -----------------------------------------------------------------------------------------

ids = st.sampled_from([*LETTERS, *LETTERS, 65, 300, 511])
words = st.text(alphabet="abcdefgh ", min_size=1, max_size=3).filter(str.strip)
structures = st.sampled_from(
    [
        {"regex": "[a-h]{2,7}z?"},
        {"regex": "(ab|cd|ef)*g"},
        {"choice": ["a", "abc", "cd", "hijk"]},
        {"json": {"enum": ["b", 1, None]}, "disable_any_whitespace": True},
        {"grammar": 'start: "(" start ")" | "a"'},
    ]
)
fields = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 30), "seed": st.none() | st.integers(0, 2**40)},
    optional={
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([1, 3, 20]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.sampled_from([0.05, 0.4]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "frequency_penalty": st.sampled_from([-0.5, 1.2]),
        "presence_penalty": st.sampled_from([-0.7, 2.0]),
        "stop": st.lists(words, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "stop_token_ids": st.lists(ids, max_size=2),
        "min_tokens": st.integers(0, 6),
        "ignore_eos": st.booleans(),
        "logit_bias": st.dictionaries(ids, st.sampled_from([-100.0, -2.0, 3.5]), max_size=3),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=9),
        "bad_words": st.lists(words, max_size=3),
        "structured_outputs": structures,
        "logprobs": st.integers(0, 5),
        "prompt_logprobs": st.integers(0, 3),
        "truncate_prompt_tokens": st.sampled_from([-1, 1, 17, M]),
        "skip_special_tokens": st.booleans(),
        "output_kind": st.sampled_from(RequestOutputKind),
    },
)


@st.composite
def params(draw: st.DrawFn, long: bool) -> SamplingParams:
    some = draw(fields)
    if long:
        some |= {"max_tokens": 30, "ignore_eos": True}
    if "structured_outputs" in some and draw(st.integers(0, 2)):
        del some["structured_outputs"]  # with most others in it, nothing is left to choose too often
    some["min_tokens"] = min(some.get("min_tokens", 0), some["max_tokens"])
    if draw(st.integers(0, 9)) == 0:
        some["max_tokens"] = None
    if "stop" not in some and draw(st.booleans()):
        some["detokenize"] = False
    return SamplingParams(**some)


@st.composite
def prompts(draw: st.DrawFn, longest: int) -> list[int]:
    """Many begin alike."""
    length = draw(st.integers(1, longest))
    common = min(length - 1, draw(st.sampled_from([0, 20, 40])))
    return prompt_of(common) + prompt_of(length - common, seed=draw(st.integers(1, 9)))


@st.composite
def options(draw: st.DrawFn, crowded: bool) -> dict[str, Any]:
    """With room for the largest request alone, and not for many."""
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    chunked = draw(st.booleans())
    tight = {"num_blocks": 3 * -(-M // block_size), "max_num_seqs": 16, "scheduler": "continuous"}
    return {
        "block_size": block_size,
        "num_blocks": 3 * -(-M // block_size) + draw(st.sampled_from([0, 0, 30, 200])) // block_size,
        "max_num_seqs": draw(st.sampled_from([3, 4, 7, 16, 16])),
        "max_num_batched_tokens": draw(st.integers(1, 150) if chunked else st.integers(M, 2 * M)),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "scheduler": draw(st.sampled_from(["continuous", "continuous", "static"])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "record_events": draw(st.booleans()),
        "max_model_len": M,
        **(tight if crowded else {}),
    }


# Each with a word of the message, which is the field's name.
BAD: list[tuple[str, list[int], dict[str, Any]]] = [
    ("stop_token_ids", [1], {"stop_token_ids": [512]}),
    ("allowed_token_ids", [1], {"allowed_token_ids": [512]}),
    ("logit_bias", [1], {"logit_bias": {512: 1.0}}),
    ("logit_bias", [1], {"logit_bias": {5: 101}}),
    ("logprobs", [1], {"logprobs": 513}),
    ("prompt_logprobs", [1], {"prompt_logprobs": 513}),
    ("n is 17", [1], {"n": 17}),
    ("truncate_prompt_tokens", [1], {"truncate_prompt_tokens": M + 1}),
    (r"structured_outputs\.regex", [1], {"structured_outputs": {"regex": "a("}}),
    ("min_tokens", [1], {"min_tokens": 4, "max_tokens": 3}),
    ("max_tokens", [1], {"max_tokens": 0}),
    ("temperature", [1], {"temperature": -1.0}),
    ("bad_words", [1], {"bad_words": [""]}),
    ("stop must be", [1], {"stop": [""]}),
    ("detokenize", [1], {"stop": "a", "detokenize": False}),
    ("output_kind", [1], {"output_kind": 7}),
    (f"{M} tokens", [7] * M, {}),
    ("512", [512], {}),
    ("no tokens", [], {}),
]


# ---- what must be right ------------------------------------------------------------------------------------


def whole(outputs: list[RequestOutput], kind: RequestOutputKind, n: int) -> RequestOutput:
    """What the reports of a request say together."""
    if kind is not RequestOutputKind.DELTA:
        for earlier, later in pairwise(outputs):
            for a, b in zip(earlier.outputs, later.outputs, strict=True):
                assert b.token_ids[: len(a.token_ids)] == a.token_ids
                assert b.text.startswith(a.text)
        return outputs[-1]
    completions: dict[int, Any] = {}
    for output in outputs:
        for c in output.outputs:
            before = completions.get(c.index)
            if before is not None:
                assert before.finish_reason is None  # nothing follows an end
                logprobs = None if c.logprobs is None else before.logprobs + c.logprobs
                ids, text = before.token_ids + c.token_ids, before.text + c.text
                c = replace(c, token_ids=ids, text=text, logprobs=logprobs)
            completions[c.index] = c
    told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(told) <= 1
    return replace(
        outputs[-1], outputs=[completions[i] for i in range(n)], prompt_logprobs=told[0] if told else None
    )


def check_ends(output: RequestOutput, p: SamplingParams) -> None:
    """How long each output is, why it ended, and that its text says so."""
    room = M - len(output.prompt_token_ids)
    most = room if p.max_tokens is None else min(room, p.max_tokens)
    assert [c.index for c in output.outputs] == list(range(p.n))
    for c in output.outputs:
        assert len(c.token_ids) <= most
        if c.finish_reason == "length":
            assert len(c.token_ids) == most
        elif c.finish_reason == "stop" and p.structured_outputs is None:
            assert len(c.token_ids) > p.min_tokens
            ended_by = c.stop_reason if c.stop_reason is not None else c.token_ids[-1]
            assert ended_by in (*p.stop, *p.stop_token_ids, *([] if p.ignore_eos else ENDS))
        else:
            assert c.finish_reason in ("stop", "error")
        if c.finish_reason == "error":
            assert "no token is allowed" in str(c.stop_reason)
        if p.min_tokens == 0:
            shown = c.text
            if p.include_stop_str_in_output and c.stop_reason in p.stop:
                assert shown.endswith(str(c.stop_reason))
                shown = shown[:-1]
            assert all(stop not in shown for stop in p.stop)
        assert p.detokenize or c.text == ""
        if p.allowed_token_ids is not None:
            assert set(c.token_ids) <= set(p.allowed_token_ids)


def check_events(engine: Engine, finished: dict[str, RequestOutput], aborted: dict[str, list[Any]]) -> None:
    """The record names the requests that were accepted, and their tokens."""
    events = engine.events()
    tokens: list[list[int]] = [[] for _ in events.sequences]
    for step in events.steps:
        for sequence, token, _ in step["sampled"]:
            tokens[sequence].append(token)
    assert {s["request_id"] for s in events.sequences} == finished.keys() | aborted.keys()
    places = Counter((s["request_id"], s["index"]) for s in events.sequences)
    assert set(places.values()) <= {1}
    for name, output in finished.items():
        assert all((name, c.index) in places for c in output.outputs if c.token_ids)
    for s, told in zip(events.sequences, tokens, strict=True):
        if s["request_id"] in finished:
            output = finished[s["request_id"]]
            own = output.outputs[s["index"]].token_ids
            assert s["prompt_token_ids"] == output.prompt_token_ids
            assert told[: len(own)] == own
            assert len(told) <= len(own) + (DEVICE == "cuda")  # a GPU may be a step ahead of a stop string


@given(data=st.data())
@settings(deadline=None, max_examples=60 if DEVICE == "cuda" else 200, derandomize=DEVICE == "cuda")
def test_any_mix(folder: Path, one: Engine, data: st.DataObject) -> None:
    """Requests of all kinds arrive, some wrong, and some are aborted, in an engine of any kind.

    Every accepted one that nobody aborts ends once, with the very tokens, texts and log probabilities that it
    gets alone if it has a seed; its reports add up to that. An aborted one reports no end. All blocks come
    back. On a GPU the examples are always the same.
    """
    draw = data.draw
    crowded = draw(st.integers(0, 2)) == 2  # so that they preempt each other
    chosen = draw(options(crowded))
    engine = open_engine(folder, **chosen)
    ranked = chosen["scheduling_policy"] == "priority"
    requests: dict[str, tuple[list[int], SamplingParams]] = {}
    reports: dict[str, list[RequestOutput]] = {}
    ended: set[str] = set()
    aborted: dict[str, list[RequestOutput]] = {}

    def step() -> None:
        for output in engine.step():
            assert output.request_id not in ended, "after its end"
            assert output.request_id not in aborted, "after it was aborted"
            reports[output.request_id].append(output)
            if output.finished:
                ended.add(output.request_id)
        engine._core.check_invariants()

    for i in range(draw(st.integers(6 if crowded else 1, 9))):
        if draw(st.integers(0, 3)) == 0:
            message, prompt, bad = draw(st.sampled_from(BAD))
            with pytest.raises(InvalidRequestError, match=message):
                engine.add_request(f"bad {i}", prompt, SamplingParams(**bad))
        p = draw(params(long=crowded))
        prompt = draw(prompts(M - 1 if p.truncate_prompt_tokens is None else 2 * M))
        if p.truncate_prompt_tokens == M:
            prompt = prompt[: M - 1]  # as many as that leave no room for a new one
        engine.add_request(str(i), prompt, p, draw(st.integers(-2, 2)) if ranked else 0)
        requests[str(i)], reports[str(i)] = (prompt, p), []
        with pytest.raises(InvalidRequestError, match=r"in use|priority"):
            engine.add_request(str(i), prompt, p, priority=0 if ranked else 1)
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2, 6]))):
            step()
        if draw(st.integers(0, 4)) == 0:
            victim = str(draw(st.integers(0, 7)))
            engine.abort_request(victim)
            if victim in requests and victim not in ended:
                aborted[victim] = reports[victim]
    for _ in range(3000):
        if not engine.has_unfinished_requests():
            break
        step()
    check_all_blocks_are_back(engine)
    assert ended | aborted.keys() == requests.keys()

    finished: dict[str, RequestOutput] = {}
    for name in sorted(ended):
        (prompt, p), outputs = requests[name], reports[name]
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        if p.output_kind is RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1
        output = finished[name] = whole(outputs, p.output_kind, p.n)
        kept = {None: len(prompt), -1: M - 1}.get(p.truncate_prompt_tokens, p.truncate_prompt_tokens)
        assert output.prompt_token_ids == prompt[-kept:]
        check_ends(output, p)
        if p.seed is not None or p.temperature == 0 or p.top_k == 1:
            (alone,) = one.generate(prompt, p)
            assert exact(output) == exact(alone)
            assert [c.stop_reason for c in output.outputs] == [c.stop_reason for c in alone.outputs]
    if chosen["record_events"]:
        check_events(engine, finished, aborted)
