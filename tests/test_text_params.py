"""SamplingParams' text fields, in the engine: stop strings, special tokens, cut prompts, kinds of output."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import pytest
from helpers import check_all_blocks_are_back, exact, greedy, open_engine, prompt_of, solo, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_output_text import ended
from tiny_vllm import RequestOutputKind
from tiny_vllm.engine import Engine
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.outputs import CompletionOutput, RequestOutput
from tiny_vllm.sampling_params import SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
START = [fixtures.CHAIN_START]
WORDS = [b"ab", b"ba", b"bab", b"a \xc3", b"\xa9b"]  # the last two have halves of a character
SPECIAL = ["<one>", "<two>"]


@pytest.fixture(scope="module")
def babbler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says the letters a and b and WORDS in any order, whatever came before."""
    folder = tmp_path_factory.mktemp("babbler")
    logits = np.full(256 + len(WORDS), -30.0)
    logits[[*b"ab"]] = 0
    logits[256:] = 0
    fixtures.write_fixed(folder, logits, eos_token_id=...)
    fixtures.write_byte_tokenizer(folder, WORDS)
    return folder


@pytest.fixture(scope="module")
def engine(babbler: Path) -> Engine:
    """All tests of the module share it, so each of them meets the others' blocks in the prefix cache."""
    return open_engine(babbler)


@pytest.fixture
def chain(tmp_path: Path) -> Engine:
    return open_engine(fixtures.write_text_chain(tmp_path, [b"al", b"pha be", b"ta ga", b"mma"]))


def seeded(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": 20, **fields})


def summary(c: CompletionOutput) -> tuple[Any, ...]:
    return c.text, c.token_ids, c.finish_reason, c.stop_reason


def reports(engine: Engine, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
    engine.add_request("x", prompt, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs.extend(engine.step())
    return outputs


def joined(outputs: list[RequestOutput], n: int) -> list[tuple[Any, ...]]:
    """What DELTA outputs say together, as summary() has it."""
    text, ids = [""] * n, [list[int]() for _ in range(n)]
    ends: list[tuple[Any, Any]] = [(None, None)] * n
    for output in outputs:
        for c in output.outputs:
            assert ends[c.index] == (None, None)  # nothing follows an end
            text[c.index] += c.text
            ids[c.index] += c.token_ids
            ends[c.index] = (c.finish_reason, c.stop_reason)
    return [(text[i], ids[i], *ends[i]) for i in range(n)]


# ---- stop strings ------------------------------------------------------------------------------------------


def test_a_stop_string(chain: Engine) -> None:
    output = chain.generate(START, greedy(stop="a bet", logprobs=1))[0]
    completion = output.outputs[0]
    assert summary(completion)[0] == "alph"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "a bet")
    assert [chain.tokenizer.token_text(i) for i in completion.token_ids] == ["al", "pha be", "ta ga"]  # type: ignore[union-attr]
    assert completion.logprobs is not None
    assert completion.cumulative_logprob is not None
    assert len(completion.logprobs) == 3
    assert output.finished
    assert output.metrics is not None
    assert output.metrics.finished_time is not None
    metrics = chain.metrics()
    assert (metrics["num_finished"], metrics["num_aborted"]) == (1, 0)
    assert metrics["num_generated_tokens"] <= 4  # a device that is a step ahead may have begun one more
    check_all_blocks_are_back(chain)


@pytest.mark.parametrize(
    ("fields", "text", "reason", "stop_reason"),
    [
        ({"stop": "a bet", "include_stop_str_in_output": True}, "alpha bet", "stop", "a bet"),
        ({"stop": "pha"}, "al", "stop", "pha"),
        ({"stop": ["mma", "ga"]}, "alpha beta ", "stop", "ga"),
        ({"stop": "ga", "max_tokens": 3}, "alpha beta ", "stop", "ga"),  # found in the last token allowed
        ({"stop": "gam", "max_tokens": 3}, "alpha beta ga", "length", None),
        ({"stop": "a", "min_tokens": 2}, "alpha bet", "stop", "a"),
        ({"stop": "pha beta", "min_tokens": 2}, "al", "stop", "pha beta"),
        ({"stop": "nothing"}, "alpha beta gamma", "stop", None),
        ({"stop": "ga", "stop_token_ids": [258]}, "alpha be", "stop", 258),  # "ta ga" itself is not shown
        (
            {"stop": "ga", "stop_token_ids": [258], "include_stop_str_in_output": True},
            "alpha beta ga",
            "stop",
            "ga",
        ),
        ({"stop_token_ids": [258], "include_stop_str_in_output": True}, "alpha beta ga", "stop", 258),
        ({"stop": ["a bet"], "n": 1, "skip_special_tokens": False}, "alph", "stop", "a bet"),
    ],
)
def test_stop_strings_and_other_fields(
    fields: dict[str, Any], text: str, reason: str, stop_reason: Any, chain: Engine
) -> None:
    params = SamplingParams(**{"temperature": 0, **fields})
    completion = chain.generate(START, params)[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, reason, stop_reason)
    assert "".join(chain.stream(START, params)) == text


words = st.text(alphabet="ab é", min_size=1, max_size=4)


@given(
    seed=st.integers(0, 2**32),
    stops=st.lists(words, max_size=3),
    include=st.booleans(),
    n=st.integers(1, 3),
    max_tokens=st.integers(1, 24),
)
@settings(max_examples=60, deadline=None)
def test_every_way_of_asking_gives_what_str_find_says(
    engine: Engine, seed: int, stops: list[str], include: bool, n: int, max_tokens: int
) -> None:
    """generate(), step() and the streams: the text of a run without stop strings, cut by definition."""
    fields = {"seed": seed, "n": n, "max_tokens": max_tokens}
    whole = engine.generate("a", SamplingParams(**fields))[0].outputs
    stopping = {**fields, "stop": stops, "include_stop_str_in_output": include}
    params = SamplingParams(**stopping)
    outputs = engine.generate("a", params)[0].outputs
    for all_of_it, output in zip(whole, outputs, strict=True):
        text, stop = ended(all_of_it.text, stops, include)
        assert (output.text, output.stop_reason) == (text, stop)
        assert output.finish_reason == ("length" if stop is None else "stop")
        assert output.token_ids == all_of_it.token_ids[: len(output.token_ids)]
        if stop is None:
            assert output.token_ids == all_of_it.token_ids
        elif len(output.token_ids) < max_tokens:  # else it may have been the end that showed what waited
            shorter = engine.tokenizer.decode(output.token_ids[:-1])  # type: ignore[union-attr]
            assert all(s not in shorter.removesuffix("\ufffd") for s in stops)  # the last token completed it
    wanted = [summary(output) for output in outputs]

    growing = reports(engine, "a", params)
    assert [summary(c) for c in growing[-1].outputs] == wanted
    for earlier, later in pairwise(growing):
        for a, b in zip(earlier.outputs, later.outputs, strict=True):
            assert b.text.startswith(a.text)
    assert [o.finished for o in growing].count(True) == 1
    delta = SamplingParams(**stopping, output_kind=DELTA)
    assert joined(reports(engine, "a", delta), n) == wanted
    assert joined(list(engine.start_stream("a", delta)), n) == wanted
    (last,) = reports(engine, "a", SamplingParams(**stopping, output_kind=FINAL_ONLY))
    assert [summary(c) for c in last.outputs] == wanted
    if n == 1:
        assert "".join(engine.stream("a", params)) == wanted[0][0]
    check_all_blocks_are_back(engine)


def test_each_of_n_stops_alone(engine: Engine) -> None:
    """The core stops computing a sequence when its stop string is found, not when the last one ends."""
    params = seeded(n=4, stop=["abab"], max_tokens=60)
    before = engine.metrics()["num_generated_tokens"]
    outputs = engine.generate("a", params)[0].outputs
    lengths = [len(o.token_ids) for o in outputs]
    assert len(set(lengths)) > 1
    generated = engine.metrics()["num_generated_tokens"] - before
    assert sum(lengths) <= generated <= sum(lengths) + 4


def test_stop_strings_with_preemption_and_prefix_hits(babbler: Path) -> None:
    """Neither changes what a request alone in a large pool gives."""
    prompts = ["ab" * 20, "ab" * 20 + "a", "b" * 33]
    params = [seeded(seed=i, max_tokens=60, stop=["bbbb", "aaaa"], logprobs=1) for i in range(6)]
    expected = [exact(solo(babbler, [prompts[i % 3]], p)[0]) for i, p in enumerate(params)]
    engine = open_engine(babbler, num_blocks=10)
    for _ in range(2):
        outputs = engine.generate([prompts[i % 3] for i in range(6)], params)
        assert [exact(output) for output in outputs] == expected
        check_all_blocks_are_back(engine)
    metrics = engine.metrics()
    assert metrics["num_preemptions"] > 0
    assert metrics["prefix_cache_hit_tokens"] > 0
    reasons = {output.outputs[0].finish_reason for output in outputs}
    assert reasons == {"stop", "length"}


def test_an_abort_shows_what_waited(engine: Engine) -> None:
    """Its stop string will not come any more."""
    everything = engine.generate("a", seeded())[0].outputs[0]
    (stream,) = [engine.start_stream("a", seeded(stop=everything.text + "!"))]
    assert next(stream).outputs[0].text == ""
    (request_id,) = engine._requests
    engine.abort_request(request_id)
    (last,) = stream
    assert last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].text
    assert everything.text.startswith(last.outputs[0].text)
    assert not engine._watched


def test_stop_strings_need_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="detokenize must be True"):
        SamplingParams(stop="a", detokenize=False)
    engine = open_engine(fixtures.write_rand(tmp_path))
    with pytest.raises(InvalidRequestError, match=r"stop needs text.*no tokenizer"):
        engine.generate([1], greedy(stop="a"))
    assert not engine.has_unfinished_requests()


# ---- detokenize and special tokens -------------------------------------------------------------------------


def test_without_detokenize_there_is_no_text(chain: Engine) -> None:
    params = {"temperature": 0, "logprobs": 1, "prompt_logprobs": 0}
    with_text = chain.generate([1, *START], SamplingParams(**params))[0]
    without = chain.generate([1, *START], SamplingParams(**params, detokenize=False))[0]
    (a,), (b,) = with_text.outputs, without.outputs
    assert (b.text, b.token_ids, b.finish_reason) == ("", a.token_ids, "stop")
    assert exact(without)[0] == exact(with_text)[0]
    for output in (a, b):
        assert output.logprobs is not None
        shown = [entry.decoded_token for row in output.logprobs for entry in row.values()]
        assert all((entry is None) == (output is b) for entry in shown)


@pytest.fixture
def special(tmp_path: Path) -> Engine:
    """Says a <one> <two> b, then the end token <end>."""
    fixtures.write_chain(tmp_path, [*b"a", 256, 257, *b"b", 258], eos=258)
    fixtures.write_byte_tokenizer(tmp_path, special=[*SPECIAL, "<end>"])
    return open_engine(tmp_path)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "a<one><two>b"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "a<one><two>b"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<one><two>b<end>"),
        ({"include_stop_str_in_output": True}, "ab"),
        ({"skip_special_tokens": False, "stop": "e><t"}, "a<on"),
        ({"stop": "e><t"}, "ab"),
    ],
)
def test_special_tokens(fields: dict[str, Any], text: str, special: Engine) -> None:
    output = special.generate(START, greedy(**fields))[0].outputs[0]
    assert output.text == text
    assert "".join(special.stream(START, greedy(**fields))) == text


# ---- truncate_prompt_tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "kept"), [(None, 40), (1, 1), (39, 39), (40, 40), (41, 40), (64, 40), (-1, 40)]
)
def test_the_last_tokens_of_a_prompt_are_kept(k: int | None, kept: int, rand_folder: Path) -> None:
    engine = open_engine(rand_folder, max_model_len=64)
    ids = prompt_of(40)
    output = engine.generate(ids, greedy(4, truncate_prompt_tokens=k))[0]
    assert output.prompt_token_ids == ids[40 - kept :]
    assert tokens_of(output) == tokens_of(
        solo(rand_folder, [ids[40 - kept :]], greedy(4), max_model_len=64)[0]
    )


def test_a_prompt_that_is_too_long_is_cut(rand_folder: Path) -> None:
    """Text, ids and conversations; the text of the prompt stays whole."""
    engine = open_engine(rand_folder, max_model_len=64)
    long = "x" * 5000 + "end"  # so long that it would be refused before it is encoded
    for prompt in (long, {"prompt": long}, {"prompt": long, "prompt_token_ids": list(long.encode())}):
        output = engine.generate(prompt, greedy(truncate_prompt_tokens=-1))[0]
        assert output.prompt == long
        assert output.prompt_token_ids == list(long.encode()[-63:])
        assert (len(tokens_of(output)), output.outputs[0].finish_reason) == (1, "length")
        assert len(list(engine.start_stream(prompt, greedy(truncate_prompt_tokens=-1)))) == 1
        with pytest.raises(InvalidRequestError, match="64"):
            engine.generate(prompt, greedy())
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens must be at most max_model_len, 64"):
        engine.generate("a", greedy(truncate_prompt_tokens=65))


def test_a_conversation_that_is_too_long_is_cut(tmp_path: Path) -> None:
    fixtures.write_rand(tmp_path)
    fixtures.write_byte_tokenizer(
        tmp_path, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    engine = open_engine(tmp_path, max_model_len=64)
    messages = [{"role": "user", "content": "x" * 5000 + "end"}]
    params = greedy(2, truncate_prompt_tokens=5)
    for output in (
        engine.chat(messages, params)[0],
        engine.chat([messages], [params])[0],
        *list(engine.start_stream(messages, params))[-1:],
    ):
        assert output.prompt_token_ids == list(b"xxend")
    with pytest.raises(InvalidRequestError, match="Shorten"):
        engine.chat(messages, greedy())


# ---- output_kind -------------------------------------------------------------------------------------------


def test_deltas_join_up_to_the_whole(engine: Engine) -> None:
    params = {"n": 2, "logprobs": 1, "prompt_logprobs": 0, "stop": ["abab"]}
    whole = engine.generate("ab", seeded(**params))[0]
    for outputs in (
        reports(engine, "ab", seeded(**params, output_kind=DELTA)),
        list(engine.start_stream("ab", seeded(**params, output_kind=DELTA))),
    ):
        assert joined(outputs, 2) == [summary(c) for c in whole.outputs]
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [o.prompt_logprobs is not None for o in outputs] == [True] + [False] * (len(outputs) - 1)
        for i, wanted in enumerate(whole.outputs):
            own = [c for o in outputs for c in o.outputs if c.index == i]
            assert [row for c in own for row in c.logprobs or ()] == wanted.logprobs
            assert own[-1].cumulative_logprob == wanted.cumulative_logprob


def test_a_delta_is_since_the_last_report(engine: Engine) -> None:
    """Not since the last step: others may have run steps in between."""
    whole = tokens_of(engine.generate("a", seeded())[0])
    engine.add_request("x", "a", seeded(output_kind=DELTA))
    (first,) = engine.step()
    engine.generate("b", greedy(5))
    (second,) = engine.step()
    assert len(tokens_of(first)) == 1
    assert len(tokens_of(second)) > 4
    assert tokens_of(first) + tokens_of(second) == whole[: 1 + len(tokens_of(second))]
    engine.abort_request("x")


def test_the_end_only(engine: Engine) -> None:
    whole = engine.generate("a", seeded(n=2))[0]
    for outputs in (
        reports(engine, "a", seeded(n=2, output_kind=FINAL_ONLY)),
        list(engine.start_stream("a", seeded(n=2, output_kind=FINAL_ONLY))),
    ):
        (output,) = outputs
        assert output.finished
        assert exact(output) == exact(whole)
    assert list(engine.stream("a", seeded(output_kind=FINAL_ONLY))) == [
        engine.generate("a", seeded())[0].outputs[0].text
    ]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_the_kind_does_not_change_whole_answers_and_text_streams(
    kind: RequestOutputKind, engine: Engine
) -> None:
    whole = engine.generate("a", seeded())[0]
    assert exact(engine.generate("a", seeded(output_kind=kind))[0]) == exact(whole)
    params = seeded(output_kind=kind)
    assert "".join(engine.stream("a", params)) == whole.outputs[0].text
    assert params.output_kind is kind


def test_an_aborted_delta_says_so(engine: Engine) -> None:
    stream = engine.start_stream("a", seeded(output_kind=DELTA))
    first = next(stream)
    (request_id,) = engine._requests
    engine.abort_request(request_id)
    last = list(stream)[-1]
    assert (first.outputs[0].finish_reason, last.outputs[0].finish_reason) == (None, "abort")


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ""),
        ("stop", b"a"),
        ("stop", {"a": 1}),
        ("include_stop_str_in_output", 1),
        ("detokenize", None),
        ("skip_special_tokens", "yes"),
        ("spaces_between_special_tokens", 0),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 1.5),
        ("truncate_prompt_tokens", True),
        ("output_kind", 3),
        ("output_kind", "DELTA"),
        ("output_kind", True),
        ("output_kind", None),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        SamplingParams(**{field: value})


def test_defaults_and_forms() -> None:
    params = SamplingParams()
    assert (params.stop, params.include_stop_str_in_output, params.detokenize) == ([], False, True)
    assert (params.skip_special_tokens, params.spaces_between_special_tokens) == (True, True)
    assert (params.truncate_prompt_tokens, params.output_kind) == (None, CUMULATIVE)
    assert SamplingParams(stop="a").stop == SamplingParams(stop=("a",)).stop == ["a"]
    assert SamplingParams(output_kind=1).output_kind is DELTA  # type: ignore[arg-type]
    assert [kind.value for kind in RequestOutputKind] == [0, 1, 2]
