"""Public failures of engines like this one, replayed: paged KV, and scheduling.

The first line of each test says what is right. The numbers are those of the project's list of such reports.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fixtures
import pytest
from helpers import check_all_blocks_are_back, exact, finish, greedy, open_engine, prompt_of, solo, tokens_of
from tiny_vllm.engine import Engine
from tiny_vllm.errors import InvalidRequestError
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams

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

    (alone,) = solo(rand_folder, [prompts[0]], greedy(30, logprobs=1))
    preemptions = tight.metrics()["num_preemptions"]
    for engine in (roomy, tight):
        for output in engine.generate([prompts[0]] * 2, greedy(30, n=3, logprobs=1)):
            for child in output.outputs:
                assert exact(replace(alone, outputs=[replace(child, index=0)])) == exact(alone)
        check_all_blocks_are_back(engine)
    assert tight.metrics()["num_preemptions"] > preemptions


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


def test_b26_twice_before_the_first_has_begun(rand_folder: Path) -> None:
    """Right: an id is taken from the moment its request is accepted, and free from the moment it is aborted,
    also for one that waits, has several outputs, or belongs to generate().
    """
    params = SamplingParams(n=2, seed=1, max_tokens=8)
    alone = [exact(o) for o in solo(rand_folder, [[1, 2], [3, 4]], params)]
    engine = open_engine(rand_folder, max_num_seqs=2)
    engine.add_request("first", [1, 2], params)
    engine.add_request("x", [1, 2], params)  # waits: both seats are taken
    for _ in range(3):
        for prompt, again in (([3, 4], params), ([1, 2], params), ([3, 4], greedy(1))):
            with pytest.raises(InvalidRequestError, match="'x' is in use"):
                engine.add_request("x", prompt, again)
        engine.step()
    engine.abort_request("x")
    engine.add_request("x", [3, 4], params)
    last = finish(engine)
    assert [exact(last["first"]), exact(last["x"])] == alone

    stream = engine.start_stream([1, 2], params)
    taken = f"tiny-vllm-{int(next(stream).request_id.rpartition('-')[2]) + 1}"
    engine.add_request(taken, [3, 4], params)  # the name that the next call would choose
    assert exact(engine.generate([1, 2], params)[0]) == alone[0]
    assert exact(list(stream)[-1]) == alone[0]
    assert exact(finish(engine)[taken]) == alone[1]
    check_all_blocks_are_back(engine)


def test_b27_an_empty_prompt_beside_a_healthy_one(rand_folder: Path) -> None:
    """Right: it is refused by every call, leaves nothing, and who runs does not notice."""
    engine = open_engine(rand_folder)
    engine.add_request("healthy", [1, 2, 3], greedy(20))
    empty: list[Any] = ["", [], {"prompt": ""}, {"prompt_token_ids": []}, ()]
    for i, prompt in enumerate(empty):
        engine.step()
        with pytest.raises(InvalidRequestError, match="no tokens"):
            engine.add_request(f"empty {i}", prompt, greedy(2))
        for call in (engine.stream, engine.start_stream):
            with pytest.raises(InvalidRequestError, match="no tokens"):
                call(prompt, greedy(2))
    assert engine.metrics()["num_requests_running"] == 1
    last = finish(engine)
    assert list(last) == ["healthy"]
    assert exact(last["healthy"]) == exact(solo(rand_folder, [[1, 2, 3]], greedy(20))[0])
    check_all_blocks_are_back(engine)


def test_b27_nothing_to_compute(tmp_path: Path) -> None:
    """Right: zero ids are refused for that request alone; with a begin token "" is one token."""
    fixtures.write_fixed(tmp_path / "plain", [0.0] * 300)
    fixtures.write_byte_tokenizer(
        tmp_path / "plain", special=["<s>"], bos="<s>", chat_template="{{ messages[0].content }}"
    )
    fixtures.write_fixed(tmp_path / "bos", [0.0] * 300)
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    fixtures.write_byte_tokenizer(
        tmp_path / "bos", special=["<s>"], bos="<s>", add_bos=True, chat_template=template
    )

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
    said_nothing = [{"role": "user", "content": ""}]
    assert bos.chat(said_nothing, greedy(2))[0].prompt_token_ids == [256]
    for messages in ([], [[]]):
        with pytest.raises(InvalidRequestError, match="messages"):
            bos.chat(messages, greedy(2))  # type: ignore[arg-type]
    check_all_blocks_are_back(bos)
