"""The engine's Python interface: requests, steps, streams, outputs, options, and that nothing leaks."""

from __future__ import annotations

import inspect
import itertools
import time
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import pytest
from helpers import (
    check_all_blocks_are_back,
    exact,
    exact_row,
    finish,
    greedy,
    open_engine,
    prompt_of,
    solo,
    tokens_of,
)
from tiny_vllm.config import EngineConfig
from tiny_vllm.engine import Engine
from tiny_vllm.errors import InvalidRequestError, ModelLoadError, OutOfMemoryError
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams

HELLO = list(b"Hello")


@pytest.fixture
def engine(rand_folder: Path) -> Engine:
    return open_engine(rand_folder)


@pytest.fixture(scope="module")
def answer(rand_folder: Path) -> Callable[..., RequestOutput]:
    """What a request gives alone."""

    def run(prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
        return solo(rand_folder, [prompt], params, **options)[0]

    return run


# ---- whole answers -----------------------------------------------------------------------------------------


def test_every_form_of_a_prompt(engine: Engine) -> None:
    params = greedy(5)
    forms = ["Hello", HELLO, tuple(HELLO), {"prompt": "Hello"}, {"prompt_token_ids": HELLO}]
    one_by_one = [engine.generate(form, params)[0] for form in forms]
    as_batch = engine.generate(forms, params)
    for output in (*one_by_one, *as_batch):
        assert output.prompt_token_ids == HELLO
        assert tokens_of(output) == tokens_of(one_by_one[0])
    assert [o.prompt for o in as_batch] == ["Hello", None, None, "Hello", None]
    both = engine.generate({"prompt": "as a note", "prompt_token_ids": HELLO}, params)[0]
    assert (both.prompt, both.prompt_token_ids) == ("as a note", HELLO)


def test_outputs_have_vllms_fields(engine: Engine) -> None:
    output = engine.generate("Hello", greedy(4, logprobs=2, prompt_logprobs=1))[0]
    assert output.finished is True
    assert isinstance(output.request_id, str)
    assert output.num_cached_tokens == 0
    assert output.metrics is not None
    assert output.metrics.first_token_time is not None
    assert output.metrics.finished_time is not None
    assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finished_time
    (completion,) = output.outputs
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert completion.finished()
    assert len(completion.token_ids) == 4
    assert completion.logprobs is not None
    assert [len(row) for row in completion.logprobs] == [2] * 4  # greedy: the chosen one is among the two
    assert completion.cumulative_logprob == pytest.approx(
        sum(row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True))
    )
    assert output.prompt_logprobs is not None
    assert [row and len(row) in (1, 2) for row in output.prompt_logprobs] == [None, True, True, True, True]
    entry = completion.logprobs[0][completion.token_ids[0]]
    assert entry.decoded_token == engine.tokenizer.token_text(completion.token_ids[0])  # type: ignore[union-attr]

    plain = engine.generate("Hello", greedy(4))[0]
    assert plain.prompt_logprobs is None
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None)


def test_an_output_is_the_callers_own(engine: Engine, answer: Callable[..., RequestOutput]) -> None:
    """Whatever is done to it, later ones are right."""
    params = greedy(4, logprobs=1, prompt_logprobs=1)
    prompt = list(HELLO)
    engine.add_request("a", prompt, params)
    prompt.clear()
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        assert output.prompt_token_ids == HELLO
        if output.finished:
            assert exact(output) == exact(answer(HELLO, params))
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        for row in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs):
            assert row is not None
            row.clear()
        for values in (output.prompt_token_ids, output.prompt_logprobs, *vars(output.outputs[0]).values()):
            if isinstance(values, list):
                values.clear()
        output.outputs.clear()


def test_outputs_of_requests_that_failed(tmp_path: Path) -> None:
    """No token, so no time of the first one and no log probabilities of the prompt."""
    fixtures.write_fixed(tmp_path, [0.0, np.inf])
    output = open_engine(tmp_path).generate([[0]], greedy(3, prompt_logprobs=0))[0]
    assert output.outputs[0].finish_reason == "error"
    assert output.prompt_logprobs is None
    assert output.metrics is not None
    assert output.metrics.first_token_time is None
    assert output.metrics.finished_time is not None
    assert output.metrics.finished_time >= output.metrics.arrival_time


def test_prompt_logprobs_of_several_outputs(rand_folder: Path) -> None:
    """They come with the first output, whatever else is asked for."""
    prompt = prompt_of(6)
    alone = open_engine(rand_folder).generate(prompt, greedy(1, prompt_logprobs=1))[0].prompt_logprobs
    assert alone is not None
    for logprobs in (None, 2):
        params = SamplingParams(n=3, seed=1, max_tokens=3, prompt_logprobs=1, logprobs=logprobs)
        output = open_engine(rand_folder).generate(prompt, params)[0]
        assert output.prompt_logprobs == alone


@pytest.mark.parametrize("tokens", [0, 2])
def test_outputs_of_requests_that_were_aborted(tokens: int, engine: Engine) -> None:
    stream = engine.start_stream(HELLO, greedy(9, prompt_logprobs=0))
    for _ in range(tokens):
        next(stream)
    (request_id,) = engine._requests
    engine.abort_request(request_id)
    (output,) = stream
    assert (output.outputs[0].finish_reason, len(tokens_of(output))) == ("abort", tokens)
    assert (output.prompt_logprobs is None) == (tokens == 0)
    assert output.metrics is not None
    assert (output.metrics.first_token_time is None) == (tokens == 0)
    assert output.metrics.finished_time is not None
    assert output.metrics.finished_time >= (output.metrics.first_token_time or output.metrics.arrival_time)


def test_outputs_of_prompts_that_were_refused(engine: Engine) -> None:
    """As complete as others: n completions, times, and the text."""
    ids = [100_000]
    prompts = [HELLO, ids, {"prompt": "note", "prompt_token_ids": ids}, "long " * 2000]
    before = time.monotonic()
    fine, *others = engine.generate(prompts, SamplingParams(n=2, max_tokens=3, logprobs=1))
    assert [c.finish_reason for c in fine.outputs] == ["length", "length"]
    assert [o.prompt for o in others] == [None, "note", "long " * 2000]
    for output in others:
        assert output.finished
        assert [(c.index, c.finish_reason, c.token_ids, c.logprobs) for c in output.outputs] == [
            (0, "error", [], []),
            (1, "error", [], []),
        ]
        assert output.metrics is not None
        assert before <= output.metrics.arrival_time == output.metrics.finished_time <= time.monotonic()
        assert output.metrics.first_token_time is None


def test_a_refused_n_is_not_a_number_of_outputs(engine: Engine) -> None:
    _, refused = engine.generate([HELLO, HELLO], [greedy(1), SamplingParams(n=2**40)])
    assert [c.finish_reason for c in refused.outputs] == ["error"]


def test_logprobs_are_of_the_models_distribution(engine: Engine) -> None:
    """A row over the whole vocabulary sums to one, is sorted, and the prompt's rows are the output's rows:
    the same position seen as the end of a prompt and as its middle.
    """
    prompt = prompt_of(20)
    output = engine.generate(prompt, greedy(8, logprobs=512))[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    for row, token in zip(completion.logprobs, completion.token_ids, strict=True):
        values = np.array([entry.logprob for entry in row.values()])
        assert np.exp(values.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
        assert (np.diff(values) <= 0).all()
        assert [entry.rank for entry in row.values()] == list(range(1, 513))
        assert next(iter(row)) == token

    longer = engine.generate(prompt + completion.token_ids, greedy(1, prompt_logprobs=512))[0]
    assert longer.prompt_logprobs is not None
    for i in range(8):
        row = longer.prompt_logprobs[20 + i]
        assert row is not None
        values = {token: value for token, value, _ in exact_row(row)}
        assert values == {token: value for token, value, _ in exact_row(completion.logprobs[i])}

    # Each row begins with the prompt's own token; with 0 nothing else is in it.
    for count in (0, 3):
        short = engine.generate(prompt, greedy(1, prompt_logprobs=count))[0].prompt_logprobs
        assert short is not None
        for row, whole, token in zip(short[1:], longer.prompt_logprobs[1:20], prompt[1:], strict=True):
            assert row is not None
            assert whole is not None
            assert next(iter(row)) == token
            assert count <= len(row) <= count + 1
            values = {token: value for token, value, _ in exact_row(whole)}
            assert all(values[t] == value for t, value, _ in exact_row(row))


def test_a_batch_keeps_its_order(engine: Engine, answer: Callable[..., RequestOutput]) -> None:
    prompts = [prompt_of(n, seed=n) for n in (40, 1, 17, 3)]
    params = [greedy(n) for n in (2, 9, 1, 5)]
    outputs = engine.generate(prompts, params)
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert exact(output) == exact(answer(prompt, p))
    check_all_blocks_are_back(engine)


def test_more_requests_than_seats(engine: Engine, rand_folder: Path) -> None:
    small = open_engine(rand_folder, max_num_seqs=2)
    prompts = [prompt_of(5, seed=i) for i in range(9)]
    assert [tokens_of(o) for o in small.generate(prompts, greedy(6))] == [
        tokens_of(o) for o in engine.generate(prompts, greedy(6))
    ]
    check_all_blocks_are_back(small)


def test_parameters_for_each_prompt(engine: Engine) -> None:
    outputs = engine.generate(["a", "b"], [greedy(1), greedy(3)])
    assert [len(tokens_of(o)) for o in outputs] == [1, 3]
    with pytest.raises(InvalidRequestError, match="2 entries for 1 prompts"):
        engine.generate(["a"], [greedy(1), greedy(3)])
    with pytest.raises(InvalidRequestError, match="sampling_params must be SamplingParams"):
        engine.generate("a", {"temperature": 0})  # type: ignore[arg-type]
    assert engine.generate([], greedy(1)) == []
    check_all_blocks_are_back(engine)


def test_the_progress_callback(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    engine.generate(
        ["a", "b", "c"], [greedy(1), greedy(5), greedy(9)], progress=lambda *counts: seen.append(counts)
    )
    assert seen[0] == (0, 3)
    assert seen[-1] == (3, 3)
    assert seen == sorted(set(seen))


def test_a_callback_that_raises_leaves_nothing_behind(engine: Engine) -> None:
    def progress(done: int, total: int) -> None:
        if done > 0:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate(["a", "b"], [greedy(2), greedy(90)], progress=progress)
    assert not engine.has_unfinished_requests()
    check_all_blocks_are_back(engine)
    assert len(tokens_of(engine.generate("a", greedy(3))[0])) == 3


def test_n_outputs(engine: Engine, answer: Callable[..., RequestOutput]) -> None:
    """Output i is what the seed + i gives alone; they share the prompt's blocks until they write."""
    prompt = prompt_of(20)
    (output,) = engine.generate(prompt, SamplingParams(n=3, seed=9, max_tokens=10))
    assert [c.index for c in output.outputs] == [0, 1, 2]
    for i, completion in enumerate(output.outputs):
        single = answer(prompt, SamplingParams(seed=9 + i, max_tokens=10))
        assert completion.token_ids == tokens_of(single)
    # The half-filled block is shared by three. The first two to write copy it, the last one keeps it.
    assert engine.metrics()["num_block_copies"] == 2
    assert engine.metrics()["num_computed_tokens"] == 20 + 3 * 9
    check_all_blocks_are_back(engine)


# ---- ends --------------------------------------------------------------------------------------------------


def test_stop_token_ids(engine: Engine, answer: Callable[..., RequestOutput]) -> None:
    free = tokens_of(answer(HELLO, greedy(12)))
    stop = free[4]
    at = free.index(stop)
    output = engine.generate(HELLO, greedy(12, stop_token_ids=[511 - stop, stop]))[0].outputs[0]
    assert output.token_ids == free[: at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    assert output.text == tokenizer.decode(free[:at])  # the token that stops is not shown
    # A prompt that holds the stop token does not end at once because of it.
    assert tokens_of(engine.generate([stop, *HELLO], greedy(3, stop_token_ids=[stop]))[0]) != []


def test_end_tokens_of_the_model(
    rand_folder: Path, tmp_path: Path, answer: Callable[..., RequestOutput]
) -> None:
    free = tokens_of(answer(HELLO, greedy(12)))
    end = free[5]
    fixtures.write_rand(tmp_path)
    fixtures.write_json(tmp_path / "generation_config.json", {"eos_token_id": [end]})
    engine = open_engine(tmp_path)
    output = engine.generate(HELLO, greedy(12))[0].outputs[0]
    assert output.token_ids == free[: free.index(end) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert tokens_of(engine.generate(HELLO, greedy(12, ignore_eos=True))[0]) == free


def test_infinite_logits(tmp_path: Path) -> None:
    """+infinity leaves no probabilities, so that the request ends with an error; -infinity is a token that is
    never drawn.
    """
    fixtures.write_fixed(tmp_path / "plus", [0.0, np.inf, 1.0, 0.0])
    for params in (greedy(3, logprobs=1), SamplingParams(seed=1, logprobs=1)):
        output = open_engine(tmp_path / "plus").generate([[0]], params)[0].outputs[0]
        assert (output.finish_reason, output.token_ids, output.logprobs) == ("error", [], [])
        assert "infinity" in str(output.stop_reason)

    fixtures.write_fixed(tmp_path / "minus", [0.0, -np.inf, 1.0, 0.0])
    output = (
        open_engine(tmp_path / "minus")
        .generate([[0]], SamplingParams(max_tokens=50, logprobs=4))[0]
        .outputs[0]
    )
    assert 1 not in output.token_ids
    assert output.logprobs is not None
    for row in output.logprobs:
        assert row[1].logprob == -np.inf
        assert sum(np.exp(entry.logprob) for entry in row.values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens(max_tokens: int, engine: Engine) -> None:
    output = engine.generate(HELLO, greedy(max_tokens))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (max_tokens, "length")


def test_the_models_sampling_defaults(tmp_path: Path) -> None:
    """generation_config.json's values are used when none are given, and only then."""
    fixtures.write_fixed(tmp_path, [0.0, 1.0, 2.0, 3.0])
    fixtures.write_json(tmp_path / "generation_config.json", {"top_k": 2, "temperature": 0.5, "top_p": 0.95})
    engine = open_engine(tmp_path)
    params = engine.default_sampling_params()
    assert (params.top_k, params.temperature, params.top_p, params.min_p) == (2, 0.5, 0.95, 0.0)
    tokens = [t for o in engine.generate([[0]] * 20) for t in tokens_of(o)]
    assert set(tokens) == {2, 3}
    tokens = [t for o in engine.generate([[0]] * 20, SamplingParams()) for t in tokens_of(o)]
    assert set(tokens) == {0, 1, 2, 3}
    fixtures.write_json(tmp_path / "generation_config.json", {"repetition_penalty": 1.5})
    assert open_engine(tmp_path).default_sampling_params() == SamplingParams(repetition_penalty=1.5)


# ---- step by step ------------------------------------------------------------------------------------------


def test_add_and_step(engine: Engine, answer: Callable[..., RequestOutput]) -> None:
    """Each step reports each request that it moved on, with all that it has so far."""
    assert engine.step() == []
    assert not engine.has_unfinished_requests()
    engine.add_request("a", "Hello", greedy(3))
    engine.add_request("b", prompt_of(7), greedy(5))
    assert engine.has_unfinished_requests()
    history: list[list[tuple[str, int, bool]]] = []
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        step = engine.step()
        outputs += step
        history.append(sorted((o.request_id, len(tokens_of(o)), o.finished) for o in step))
    assert history == [
        [("a", 1, False), ("b", 1, False)],
        [("a", 2, False), ("b", 2, False)],
        [("a", 3, True), ("b", 3, False)],
        [("b", 4, False)],
        [("b", 5, True)],
    ]
    assert [len(tokens_of(o)) for o in outputs[:2]] == [
        1,
        1,
    ]  # what a step returned is not changed by later ones
    assert exact(outputs[-1]) == exact(answer(prompt_of(7), greedy(5)))
    assert engine.step() == []


def test_generate_and_step_do_not_mix_up(engine: Engine) -> None:
    """Requests of add_request() go on while generate() runs, and are reported by the next step()."""
    engine.add_request("mine", HELLO, greedy(40))
    engine.generate("x", greedy(5))
    reported = engine.step()
    assert [o.request_id for o in reported] == ["mine"]
    assert len(tokens_of(reported[0])) == 6
    stream = engine.stream("y", greedy(30))
    assert {o.request_id for o in engine.step()} == {"mine"}
    assert "".join(stream) == engine.generate("y", greedy(30))[0].outputs[0].text
    engine.abort_request("mine")
    check_all_blocks_are_back(engine)


def test_what_ends_in_somebody_elses_step_is_reported_once(engine: Engine) -> None:
    engine.add_request("mine", HELLO, greedy(3))
    engine.generate("x", greedy(10))
    assert engine.has_unfinished_requests()
    with pytest.raises(InvalidRequestError, match="request_id 'mine' is in use"):
        engine.add_request("mine", HELLO, greedy(3))
    (reported,) = engine.step()
    assert (reported.request_id, reported.finished, len(tokens_of(reported))) == ("mine", True, 3)
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    check_all_blocks_are_back(engine)


def test_an_end_that_was_not_reported_can_be_aborted(engine: Engine) -> None:
    engine.add_request("mine", HELLO, greedy(3))
    engine.generate("x", greedy(10))
    engine.abort_request("mine")
    assert not engine.has_unfinished_requests()
    engine.add_request("mine", HELLO, greedy(1))
    assert [len(tokens_of(o)) for o in engine.step()] == [1]


def test_a_request_keeps_the_parameters_it_was_given(
    engine: Engine, answer: Callable[..., RequestOutput]
) -> None:
    """Whatever is assigned to them later; and another request is not disturbed."""
    params = greedy(6, stop_token_ids=[511])
    expected = exact(answer(HELLO, params))
    stream = engine.start_stream(HELLO, params)
    engine.add_request("a", HELLO, params)
    engine.step()
    params.logprobs = 2
    params.n = "many"  # type: ignore[assignment]
    params.stop_token_ids += tokens_of(answer(HELLO, greedy(6)))
    assert exact(finish(engine)["a"]) == expected
    *_, last = stream
    assert exact(last) == expected


def test_ids_of_generate_avoid_those_in_use(engine: Engine) -> None:
    engine.add_request("tiny-vllm-1", HELLO, greedy(3))
    engine.add_request("tiny-vllm-3", HELLO, greedy(3))
    outputs = engine.generate([HELLO, HELLO], greedy(3))
    assert [tokens_of(o) for o in outputs] == [tokens_of(outputs[0])] * 2
    assert outputs[0].request_id != outputs[1].request_id


def test_abort_in_every_state(rand_folder: Path) -> None:
    """Queued, amid its prompt, decoding, with children: all blocks come back, the others go on."""
    engine = open_engine(rand_folder, max_num_batched_tokens=16, max_num_seqs=4)
    engine.add_request("stays", HELLO, greedy(30))
    engine.add_request("children", prompt_of(20), SamplingParams(n=2, max_tokens=30))
    for _ in range(6):
        engine.step()
    engine.add_request("decoding", prompt_of(3), greedy(100))
    for _ in range(2):
        engine.step()
    engine.abort_request("decoding")
    engine.add_request("prefilling", prompt_of(200), greedy(5))
    engine.add_request("queued", prompt_of(50), greedy(5))
    engine.step()
    metrics = engine.metrics()
    assert metrics["num_requests_waiting"] == 1
    assert metrics["num_requests_running"] == 4  # two children, stays, prefilling
    for request_id in ("queued", "prefilling", "children"):
        engine.abort_request(request_id)
        engine._core.check_invariants()
    assert engine.metrics()["num_requests_running"] == 1
    last = finish(engine)
    assert list(last) == ["stays"]
    assert tokens_of(last["stays"]) == tokens_of(solo(rand_folder, [HELLO], greedy(30))[0])
    assert engine.metrics()["num_aborted"] == 4
    check_all_blocks_are_back(engine)


def test_abort_from_a_callback_of_generate(engine: Engine) -> None:
    """generate() returns what an aborted request has, with finish_reason "abort"."""

    def progress(done: int, total: int) -> None:
        if done == 1:
            (long_one,) = engine._requests
            engine.abort_request(long_one)

    outputs = engine.generate(["a", "b"], [greedy(3), greedy(500)], progress=progress)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "abort"]
    assert outputs[1].finished
    assert len(tokens_of(outputs[1])) == 3
    check_all_blocks_are_back(engine)


# ---- streams -----------------------------------------------------------------------------------------------


def test_a_stream_is_the_text_of_generate(engine: Engine) -> None:
    for seed in range(5):
        params = SamplingParams(seed=seed, max_tokens=40)
        pieces = list(engine.stream("Once", params))
        assert "".join(pieces) == engine.generate("Once", params)[0].outputs[0].text
        assert all(pieces)  # no empty ones
        assert len(pieces) > 5
    check_all_blocks_are_back(engine)


def test_a_stream_of_outputs(engine: Engine) -> None:
    outputs = list(engine.start_stream("Once", greedy(6)))
    assert [len(tokens_of(o)) for o in outputs] == [1, 2, 3, 4, 5, 6]
    assert [o.finished for o in outputs] == [False] * 5 + [True]
    assert exact(outputs[-1]) == exact(engine.generate("Once", greedy(6))[0])


def test_a_stream_that_is_dropped_ends_its_request(engine: Engine) -> None:
    never_started = engine.stream("a", greedy(50))
    assert engine.has_unfinished_requests()
    del never_started
    assert not engine.has_unfinished_requests()

    started = engine.stream("a", greedy(50))
    next(started)
    assert engine.metrics()["num_free_blocks"] < engine.metrics()["num_blocks"]
    del started
    check_all_blocks_are_back(engine)

    closed = engine.start_stream("a", greedy(50))
    next(closed)
    closed.close()  # type: ignore[attr-defined]
    check_all_blocks_are_back(engine)
    assert list(closed) == []


def test_two_streams_at_once(engine: Engine) -> None:
    expected = [engine.generate(p, greedy(20))[0].outputs[0].text for p in ("one", "two")]
    one, two = engine.stream("one", greedy(20)), engine.stream("two", greedy(20))
    pieces = list(itertools.zip_longest(one, two, fillvalue=""))
    assert ["".join(text) for text in zip(*pieces, strict=True)] == expected


def test_a_stream_gets_all_whoever_runs_the_steps(engine: Engine) -> None:
    expected = [engine.generate(p, greedy(20))[0] for p in ("one", "two")]
    texts = [o.outputs[0].text for o in expected]

    stream = engine.stream("one", greedy(20))
    engine.generate("other", greedy(50))
    assert "".join(stream) == texts[0]

    one, two = engine.stream("one", greedy(20)), engine.stream("two", greedy(20))
    assert ["".join(s) for s in (one, two)] == texts  # the first one runs the steps of both

    stream = engine.stream("two", greedy(20))
    begin = next(stream)
    for _ in range(30):
        engine.step()
    assert begin + "".join(stream) == texts[1]

    outputs = engine.start_stream("one", greedy(20))
    engine.generate("other", greedy(5))
    assert [len(tokens_of(o)) for o in outputs] == list(range(5, 21))
    outputs = engine.start_stream("one", greedy(20))
    engine.generate("other", greedy(50))
    assert [exact(o) for o in outputs] == [exact(expected[0])]  # one element, but the end is never left out
    check_all_blocks_are_back(engine)


def test_a_stream_that_somebody_aborts_says_so(engine: Engine) -> None:
    outputs = engine.start_stream("one", greedy(20))
    first = next(outputs)
    engine.abort_request(first.request_id)
    (last,) = outputs
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert tokens_of(last) == tokens_of(first)


def test_a_stream_that_is_closed_before_its_first_piece(engine: Engine) -> None:
    outputs = engine.start_stream("a", greedy(50))
    outputs.close()  # type: ignore[attr-defined]
    assert not engine.has_unfinished_requests()
    assert list(outputs) == []


def test_a_stream_refuses_at_the_call(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="n must be 1"):
        engine.stream("a", SamplingParams(n=2))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        engine.stream([], greedy(1))
    check_all_blocks_are_back(engine)


# ---- the prefix cache --------------------------------------------------------------------------------------


def test_cached_tokens_are_counted_and_spared(engine: Engine, rand_folder: Path) -> None:
    prompt = prompt_of(50)
    first, second = (engine.generate(prompt, greedy(4, logprobs=2))[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert exact(first) == exact(second)
    longer = engine.generate(prompt[:40] + prompt_of(9, seed=1), greedy(4))[0]
    assert longer.num_cached_tokens == 32
    metrics = engine.metrics()
    assert metrics["prefix_cache_query_tokens"] == 50 + 50 + 49
    assert metrics["prefix_cache_hit_tokens"] == 80
    assert metrics["num_computed_tokens"] == 50 + 2 + 17 + 3 * 3
    # The answer of one turn is the prompt of the next: its blocks are found as well.
    turn = engine.generate(prompt, greedy(30))[0]
    following = engine.generate(prompt + tokens_of(turn) + [1], greedy(1))[0]
    assert following.num_cached_tokens == 64

    off = open_engine(rand_folder, enable_prefix_caching=False)
    assert [off.generate(prompt, greedy(4))[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token(engine: Engine) -> None:
    for n in (16, 32, 33):
        prompt = prompt_of(n, seed=n)
        first, second = (engine.generate(prompt, greedy(4, logprobs=1))[0] for _ in range(2))
        assert second.num_cached_tokens == (n - 1) // 16 * 16
        assert exact(first) == exact(second)


# ---- schedulers --------------------------------------------------------------------------------------------


def test_static_and_continuous_batching_agree(rand_folder: Path) -> None:
    prompts = [prompt_of(n, seed=n) for n in (3, 40, 17, 100, 1, 16)]
    params = [SamplingParams(seed=n, max_tokens=4 + 3 * n, logprobs=1) for n in range(6)]
    results = {}
    for scheduler in ("static", "continuous"):
        engine = open_engine(rand_folder, scheduler=scheduler, max_num_seqs=3, max_num_batched_tokens=32)
        results[scheduler] = [exact(o) for o in engine.generate(prompts, params)]
        results[scheduler, "steps"] = engine.metrics()["num_steps"]
        check_all_blocks_are_back(engine)
    assert results["static"] == results["continuous"]
    assert results["continuous", "steps"] < results["static", "steps"]  # no empty seats


# ---- counters ----------------------------------------------------------------------------------------------


def test_a_cpu_has_no_profile(engine: Engine) -> None:
    engine.generate(prompt_of(5), greedy(2))
    assert engine.take_profile() == []


def test_metrics_add_up(engine: Engine) -> None:
    before = engine.metrics()
    assert all(before[name] == 0 for name in before if name not in ("num_blocks", "num_free_blocks"))
    engine.generate([prompt_of(20), prompt_of(30, seed=1)], [greedy(5), greedy(8)])
    m = engine.metrics()
    assert m["num_prompt_tokens"] == 50
    assert m["num_generated_tokens"] == 13
    assert m["num_computed_tokens"] == 50 + 4 + 7
    assert m["num_steps"] == 8
    assert (m["num_finished"], m["num_aborted"], m["num_preemptions"]) == (2, 0, 0)
    info = engine.info()
    contexts = 20 + 30 + sum(range(21, 25)) + sum(range(31, 38))
    assert m["bytes_read"] == 8 * info["bytes_read_per_step"] + contexts * info["kv_bytes_per_token"]
    assert info["kv_bytes_per_token"] == 2 * 2 * 2 * 64 * 4
    assert info["num_parameters"] == sum(
        int(np.prod(shape)) for shape in fixtures.tensor_shapes(fixtures.RAND).values()
    )
    assert 0 < m["forward_seconds"] < 60


def test_kv_cache_usage(engine: Engine) -> None:
    engine.add_request("a", prompt_of(40), greedy(10))
    engine.step()
    m = engine.metrics()
    assert m["num_blocks"] - m["num_free_blocks"] == 3
    assert m["kv_cache_usage"] == pytest.approx(3 / 256)
    assert (m["num_requests_running"], m["num_requests_waiting"]) == (1, 0)
    engine.abort_request("a")


# ---- options -----------------------------------------------------------------------------------------------


def test_unknown_options_are_type_errors(rand_folder: Path) -> None:
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        Engine(rand_folder, tensor_parallel_size=2)
    with pytest.raises(TypeError, match="'a', 'b'"):
        Engine(rand_folder, b=1, a=2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("device", "tpu"),
        ("dtype", "float16"),
        ("dtype", 16),
        ("load_format", "pt"),
        ("scheduler", "orca"),
        ("cpu_isa", "sse9"),
        ("block_size", 0),
        ("block_size", -16),
        ("block_size", 2**40),
        ("block_size", 1.0),
        ("max_model_len", 0),
        ("max_model_len", 1025),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", "8"),
        ("max_num_batched_tokens", 0),
        ("kv_cache_memory_bytes", 0),
        ("kv_cache_memory_bytes", -1),
        ("kv_cache_memory_bytes", 2**80),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
        ("enable_prefix_caching", 1),
        ("enable_chunked_prefill", None),
        ("enforce_eager", "yes"),
        ("num_threads", 0),
        ("num_threads", 100_000),
        ("num_threads", 2**40),
        ("seed", -1),
        ("seed", 1.5),
    ],
)
def test_bad_options_are_refused_by_name(option: str, value: Any, rand_folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match=option):
        Engine(
            rand_folder,
            **{"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 2**20, option: value},
        )


@pytest.mark.parametrize(
    "option", ["max_num_batched_tokens", "max_num_seqs", "block_size", "kv_cache_memory_bytes"]
)
@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 2**40, 2**61])
def test_huge_sizes_end_in_an_error_or_work(option: str, value: int, rand_folder: Path) -> None:
    """No overflow, no crash: it is refused by name, or there is no memory for it. Two sizes are still useful:
    as many requests at once as 32 bits can count, and 2 GiB for the cache.
    """
    options = {"kv_cache_memory_bytes": 2**20, option: value}
    if (option == "max_num_seqs" and value < 2**31) or (option == "kv_cache_memory_bytes" and value < 2**40):
        assert len(tokens_of(open_engine(rand_folder, **options).generate(HELLO, greedy(3))[0])) == 3
        return
    with pytest.raises((InvalidRequestError, OutOfMemoryError), match=option):
        open_engine(rand_folder, **options)


def test_the_smallest_sizes_work(rand_folder: Path, answer: Callable[..., RequestOutput]) -> None:
    engine = open_engine(
        rand_folder, num_blocks=11, block_size=1, max_num_seqs=1, max_num_batched_tokens=1, num_threads=1
    )
    assert engine.info()["max_total_len"] == 11
    assert tokens_of(engine.generate(HELLO, greedy(6))[0]) == tokens_of(answer(HELLO, greedy(6)))


def test_each_option_is_documented_and_shown() -> None:
    parameters = inspect.signature(Engine).parameters
    for f in fields(EngineConfig):
        assert parameters[f.name].default == f.default
        assert len(f.metadata["doc"]) > 10
    assert EngineConfig().scheduler == "continuous"
    assert EngineConfig().dtype == "auto"


def test_auto_is_bfloat16(rand_folder: Path) -> None:
    assert Engine(rand_folder, device="cpu", kv_cache_memory_bytes=2**20).info()["dtype"] == "bfloat16"


def test_the_pool_never_exceeds_what_can_be_used(rand_folder: Path) -> None:
    """Without kv_cache_memory_bytes: blocks for max_num_seqs sequences of max_model_len, if memory allows."""
    engine = Engine(rand_folder, device="cpu", max_num_seqs=3, max_model_len=100)
    assert engine.info()["num_blocks"] == 3 * 7


def test_dummy_weights(rand_folder: Path, tmp_path: Path) -> None:
    """From config.json alone, the same for the same seed, in both number formats."""
    (tmp_path / "config.json").write_bytes((rand_folder / "config.json").read_bytes())
    with pytest.raises(ModelLoadError):
        open_engine(tmp_path)

    def run(**options: Any) -> list[int]:
        return tokens_of(open_engine(tmp_path, load_format="dummy", **options).generate(HELLO, greedy(8))[0])

    assert run() == run() == run(num_threads=2)
    assert run() != run(seed=1)
    assert len(run(dtype="bfloat16")) == 8


def test_loading_reports_progress_and_can_be_stopped(rand_folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    engine = open_engine(rand_folder, progress=lambda *counts: seen.append(counts))
    assert seen[-1][0] == seen[-1][1] == engine.info()["num_parameters"] * 4
    assert seen == sorted(seen)

    def stop(done: int, total: int) -> None:
        raise ZeroDivisionError("enough")

    with pytest.raises(ZeroDivisionError, match="enough"):
        open_engine(rand_folder, progress=stop)


def test_unused_tensors_are_noted(tmp_path: Path) -> None:
    config = fixtures.llama_config()
    tensors = {
        **fixtures.random_tensors(config),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32),
    }
    fixtures.write_model(tmp_path, config, tensors)
    with pytest.warns(UserWarning, match="rotary_emb.inv_freq"):
        open_engine(tmp_path)


def test_no_warning_without_a_reason(rand_folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_engine(rand_folder).generate("Hello", greedy(2))


def test_a_folder_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    fixtures.write_rand(tmp_path)
    engine = open_engine(tmp_path)
    output = engine.generate([1, 2, 3], greedy(3, logprobs=1))[0].outputs[0]
    assert len(output.token_ids) == 3
    assert output.text == ""
    for call in (
        lambda: engine.generate("text", greedy(1)),
        lambda: engine.chat([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            call()
